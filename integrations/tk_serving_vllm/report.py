"""The counters of all workers at ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tk_serving.metrics import Collector
from tk_serving_patches import Function, Ledger, Site

_ledger = Ledger()
_collectors: dict[str, Collector] = {}


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
