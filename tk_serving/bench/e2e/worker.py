"""In vLLM's own worker processes: random weights as a load format, and what the benchmark asks a worker.

``--worker-extension-cls tk_serving.bench.e2e.worker.Extension --load-format tk_random`` serves a folder that holds a
configuration only.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from tk_serving.bench.e2e import changed, jit_monitor
from tk_serving.bench.e2e.engine import (
    by_kernel,
    compared_here,
    forget_compared_here,
    only_wrong_here,
    state_here,
    timed,
)
from tk_serving.bench.e2e.weights import register_vllm_loader

LOAD_FORMAT = register_vllm_loader()
NAME = f"{__name__}.Extension"


class Extension:
    """Methods for ``collective_rpc``; vLLM adds this class to the bases of its worker."""

    model_runner: Any
    get_model: Any

    def tk_time_steps(self) -> None:
        """Put events around every step from now on."""
        self._tk_steps: list[tuple[Any, Any]] = []
        self.model_runner.execute_model = timed(self.model_runner.execute_model, self._tk_steps)

    def tk_steps(self) -> list[float]:
        """Milliseconds of the steps since the last call."""
        torch.cuda.synchronize()
        found = [before.elapsed_time(after) for before, after in self._tk_steps]
        self._tk_steps.clear()
        return found

    def tk_change(self, share: float, octaves: int) -> str:
        """Slightly other weights, until :meth:`tk_restore`; why not, if the model cannot be changed so."""
        self._tk_changed = ExitStack()
        try:
            if share:
                self._tk_changed.enter_context(changed.moved(self.get_model(), share))
            if octaves:
                self._tk_changed.enter_context(changed.damped(self.get_model(), octaves))
        except ValueError as error:
            self._tk_changed.close()
            return str(error)
        return ""

    def tk_restore(self) -> None:
        self._tk_changed.close()

    def tk_only_wrong(self, operator: str, factor: float) -> None:
        """See :func:`tk_serving.bench.e2e.engine.only_wrong_here`; until :meth:`tk_right`."""
        self._tk_wrong = ExitStack()
        self._tk_wrong.enter_context(only_wrong_here(operator, factor))

    def tk_right(self) -> None:
        self._tk_wrong.close()

    def tk_forget_compared(self) -> None:
        """See :func:`tk_serving.bench.e2e.engine.forget_compared_here`."""
        forget_compared_here()

    def tk_compared(self) -> dict[str, Any]:
        """See :func:`tk_serving.bench.e2e.engine.compared_here`."""
        return compared_here()

    def tk_state(self) -> dict[str, Any]:
        """What this process did so far."""
        return state_here("tk_serving_vllm.activate")

    def tk_memory(self) -> dict[str, float]:
        """MiB of the device that torch has reserved here, and that live tensors take; other processes may use the
        device, too."""
        found = {"reserved_mib": torch.cuda.memory_reserved(), "allocated_mib": torch.cuda.memory_allocated()}
        return {name: round(value / 2**20, 2) for name, value in found.items()}

    def tk_watch(self) -> int:
        """See :func:`tk_serving.bench.e2e.jit_monitor.watch`."""
        return jit_monitor.watch()

    def tk_monitor(self) -> dict[str, Any]:
        """See :func:`tk_serving.bench.e2e.jit_monitor.complete`."""
        return jit_monitor.complete()

    def tk_profile(self, times: int = 0) -> dict[str, Any]:
        """Begin, or, with a number of steps, end and return what kernels took for one of them."""
        if not times:
            self._tk_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._tk_profiler.start()
            return {}
        torch.cuda.synchronize()
        self._tk_profiler.stop()
        return by_kernel(self._tk_profiler, times)
