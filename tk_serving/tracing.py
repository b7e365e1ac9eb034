"""The API log and NVTX ranges around operator calls. Both are off by default, and then cost nothing.

``TK_SERVING_LOG=api`` writes one line to stderr before each call is launched: after a crash, the last line of a process
names the call that was running. ``TK_SERVING_NVTX=1`` puts each call into a range that Nsight Systems shows. They look
at metadata only, so calls may be captured into CUDA graphs. Both settings are read once, at import.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tk_serving.config import settings

if TYPE_CHECKING:
    from tk_serving.operator import Operator
    from tk_serving.plan import Plan

log = logging.getLogger(__name__)

Run = Callable[..., list[Tensor | None]]


def traced(run: Run) -> Run:
    """``run`` with what the settings ask for around it; ``run`` itself when they ask for nothing.

    Args:
        run: :func:`tk_serving.dispatch.run`.
    """
    write = settings.log == "api"
    ranges = settings.nvtx and _has_nvtx()
    if not write and not ranges:
        return run

    @functools.wraps(run)
    def with_trace(
        op: Operator, plan: Plan, args: tuple, device: torch.device, implementation: str = ""
    ) -> list[Tensor | None]:
        if write:
            print(line(op, plan, args, device), file=sys.stderr, flush=True)
        with torch.cuda.nvtx.range(f"tk_serving.{op.qualified_name}") if ranges else contextlib.nullcontext():
            return run(op, plan, args, device, implementation)

    return with_trace


def line(op: Operator, plan: Plan, args: tuple, device: torch.device) -> str:
    """What the API log says about one call: process, operator, device, arguments, and the kernels to launch."""
    given = ", ".join(f"{p.name}={describe(value)}" for p, value in zip(op.parameters, args, strict=True))
    launches = " + ".join(map(str, plan.launches)) or plan.refusal or "nothing to launch"
    return f"tk-serving api: {os.getpid()} {op.qualified_name} {device}: {given} -> {launches}"


def describe(value: Any) -> str:
    """An argument by its metadata: ``bfloat16[4, 256]``, with strides where they are not contiguous."""
    if isinstance(value, Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return text if value.is_contiguous() else f"{text} strides {list(value.stride())}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(describe, value))})"
    return repr(value)


def _has_nvtx() -> bool:
    try:
        torch.cuda.nvtx.mark("tk_serving")
    except RuntimeError as error:  # a CPU build of torch
        log.warning("TK_SERVING_NVTX=1 has no effect: %s", error)
        return False
    return True
