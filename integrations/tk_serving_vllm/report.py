"""What became of every call site: a table in the log of each worker, and counters at ``/metrics``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tk_serving.metrics import Collector
from tk_serving_patches import Function, Ledger, Row, Site

_ledger = Ledger()
_collectors: dict[str, Collector] = {}


def table(rows: Sequence[Row]) -> str:
    """The rows as an aligned text table."""
    cells = [("site", "operator", "status", "reason"), *(dataclasses.astuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    return "\n".join(
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def as_dicts(ledger: Ledger) -> list[dict[str, str]]:
    return [dataclasses.asdict(row) for row in ledger.rows()]


def expose(folder: str) -> None:
    """Add the counters of all processes to this process's Prometheus registry, the one that serves ``/metrics``."""
    import prometheus_client

    if folder not in _collectors:
        for other in list(_collectors):  # of an earlier engine of this process; a metric has one collector
            prometheus_client.REGISTRY.unregister(_collectors.pop(other))
        _collectors[folder] = Collector(folder)
        prometheus_client.REGISTRY.register(_collectors[folder])
        _ledger.apply(_REGISTRY)


def _get_prometheus_registry(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_prometheus_registry() -> Any:
        import prometheus_client

        registry = original()
        if registry is not prometheus_client.REGISTRY:
            for collector in _collectors.values():
                registry.register(collector)
        return registry

    return get_prometheus_registry


_REGISTRY = Site(
    name="metrics",
    operators=(),
    patches=(Function("vllm.v1.metrics.prometheus:get_prometheus_registry", _get_prometheus_registry),),
    why="With several API-server processes vLLM serves /metrics from a registry that it makes on the spot.",
    how="Adds our collector to that registry.",
    until="vLLM collects metrics of plugins.",
)
