"""Kernels for every number of tokens, loaded before the first request: see :mod:`tk_serving_patches.warm`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tk_serving_patches import Function, Site
from tk_serving_patches.warm import counts, run, start

__all__ = ["SITE", "start"]

log = logging.getLogger(__name__)


def _compile_or_warm_up_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(self: Any) -> Any:
        started = time.perf_counter()
        found = run(counts(self.scheduler_config.max_num_batched_tokens), self.device)
        log.info("%d kernels of tk-serving are ready after %.1f s", found, time.perf_counter() - started)
        return original(self)

    return compile_or_warm_up_model


def _unsuitable() -> str | None:
    from vllm.platforms import current_platform

    return None if current_platform.device_type == "cuda" else "kernels run on CUDA only"


SITE = Site(
    name="warm-up",
    operators=(),
    patches=(Function("vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", _compile_or_warm_up_model),),
    why="No kernel is compiled or loaded while a request waits, nor while a graph is captured.",
    how="Plans the calls of vLLM's memory profiling again for other numbers of tokens, before vLLM's own warm-up.",
    until="vLLM's registry of warm-ups is open to plugins.",
    unsuitable=_unsuitable,
)
