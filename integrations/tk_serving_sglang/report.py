"""The counters of all schedulers at ``/metrics`` (SGLang serves it with ``--enable-metrics``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tk_serving.metrics import Collector
from tk_serving_patches import Function, Ledger, Site

_ledger = Ledger()
_folder = ""


def expose(folder: str) -> None:
    """Add the counters of all processes to the registry that SGLang makes for its page."""
    global _folder
    _folder = folder
    _ledger.apply(_REGISTRY)


def _add_prometheus_middleware(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_prometheus_middleware(app: Any) -> None:
        import prometheus_client

        make_asgi_app = prometheus_client.make_asgi_app

        def with_counters(registry: Any) -> Any:
            registry.register(Collector(_folder))
            return make_asgi_app(registry=registry)

        # The registry is a local variable of the original, which hands it to this function and to no other.
        prometheus_client.make_asgi_app = with_counters  # type: ignore[assignment]
        try:
            original(app)
        finally:
            prometheus_client.make_asgi_app = make_asgi_app

    return add_prometheus_middleware


_REGISTRY = Site(
    name="metrics",
    operators=(),
    patches=(Function("sglang.srt.utils.common:add_prometheus_middleware", _add_prometheus_middleware),),
    why="SGLang serves /metrics from a registry that it makes on the spot.",
    how="Adds our collector to that registry.",
    until="SGLang collects metrics of plugins.",
)
