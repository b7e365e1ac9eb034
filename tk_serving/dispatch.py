"""Which implementation runs a call, and the recorded reason.

Order: switched off, no work, CPU tensors (reference, or the simulator when asked), a device that the kernels do not
support, a call that no kernel covers, a kernel that may not be compiled now; else the kernel.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tk_serving import tracing
from tk_serving.compile.targets import arch_of
from tk_serving.config import settings
from tk_serving.plan import Existing, Given, Out, Plan

if TYPE_CHECKING:
    from tk_serving.operator import Operator

log = logging.getLogger(__name__)

KERNEL, SIMULATOR, REFERENCE, NOTHING, ENGINE = "kernel", "simulator", "reference", "nothing", "engine"
MIN_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Decision:
    """The implementation of one call and why it is not a kernel (empty where it is)."""

    implementation: str
    reason: str = ""


_KERNEL, _SIMULATOR = Decision(KERNEL), Decision(SIMULATOR)
_NOTHING = Decision(NOTHING, "no tokens")
_CPU = Decision(REFERENCE, "CPU tensors")

_counts: dict[tuple[str, str, str], int] = {}
_lock = threading.Lock()


def decide(op: Operator, plan: Plan, device: torch.device) -> Decision:
    """The implementation for a planned call on ``device``."""
    if op.name in settings.disable:
        return Decision(REFERENCE, "switched off by TK_SERVING_DISABLE")
    if not plan.launches and plan.refusal is None:
        return _NOTHING
    if device.type == "cpu" and settings.cpu == "reference":
        return _CPU
    if plan.refusal is not None:
        return Decision(REFERENCE, plan.refusal)
    if device.type == "cpu":
        return _SIMULATOR
    if device.index in plan.loaded:
        return _KERNEL
    if device.type != "cuda":
        return Decision(REFERENCE, f"{device.type} tensors")
    capability = _capability(device.index)
    if capability < MIN_CAPABILITY:
        return Decision(REFERENCE, "compute capability {}.{} is below 9.0".format(*capability))
    for launch in plan.launches:
        if arch_of(capability) not in launch.archs:
            return Decision(REFERENCE, f"{launch.kernel} is for {' and '.join(launch.archs)} only")
    if settings.jit == "forbid":
        from tk_serving.compile import kernels

        for launch in plan.launches:
            missing = kernels.unavailable(launch, kernels.arch_of(capability))
            if missing:
                return Decision(REFERENCE, missing)
    return _KERNEL


def _run(op: Operator, plan: Plan, args: tuple, device: torch.device, implementation: str = "") -> list[Tensor | None]:
    """Allocate the outputs, run the chosen (or the named) implementation; results in the order of ``plan.outputs``.

    A call whose implementation is named (comparisons in tests and benchmarks) is not counted.
    """
    if implementation:
        decision = Decision(implementation) if plan.launches or plan.refusal else _NOTHING
    else:
        decision = decide(op, plan, device)
        count(op.name, decision)
    if decision.implementation == REFERENCE:
        return _run_reference(op, plan, args, device)
    if decision.implementation == NOTHING:
        outputs = _outputs(op, plan, args, device, zero=True)
        for out, slot in zip(outputs, plan.outputs, strict=True):
            if not isinstance(slot, Out) and out is not None:
                out.zero_()
        return outputs
    if plan.refusal is not None:
        raise RuntimeError(f"{op.name}: no kernel for this call: {plan.refusal}")
    outputs = _outputs(op, plan, args, device, zero=False)
    buffers = outputs + [scratch.empty(device) for scratch in plan.scratch]
    if decision.implementation == SIMULATOR:
        from tk_serving import simulator

        simulator.run(plan, buffers, args)
        return outputs
    from tk_serving.compile import kernels

    loaded = plan.loaded.get(device.index)
    if loaded is None:
        arch = kernels.arch_of(_capability(device.index))
        loaded = plan.loaded[device.index] = tuple(kernels.load(launch, arch) for launch in plan.launches)
    here = torch.cuda.current_device() == device.index
    with contextlib.nullcontext() if here else torch.cuda.device(device):
        for kernel, launch in zip(loaded, plan.launches, strict=True):
            kernel(*launch.arguments(buffers, *args))
    return outputs


run = tracing.traced(_run)  # _run itself unless TK_SERVING_LOG or TK_SERVING_NVTX ask for more


def count(operator: str, decision: Decision) -> None:
    """Count one call; the first call with a new reason is logged."""
    key = (operator, decision.implementation, decision.reason)
    with _lock:
        before = _counts.get(key, 0)
        _counts[key] = before + 1
    if not before and decision.reason and decision.implementation != NOTHING:
        log.info("%s: runs the %s implementation: %s", operator, decision.implementation, decision.reason)


def counters() -> list[dict[str, Any]]:
    """Calls so far in this process: ``operator``, ``implementation``, ``reason``, ``calls``.

    A replayed CUDA graph does not pass through Python: it counts once, at capture.
    """
    with _lock:
        items = list(_counts.items())
    rows = [
        {"operator": name, "implementation": implementation, "reason": reason, "calls": calls}
        for (name, implementation, reason), calls in items
    ]
    return sorted(rows, key=lambda row: (row["operator"], row["implementation"], row["reason"]))


def reset_counters() -> None:
    with _lock:
        _counts.clear()


def _outputs(op: Operator, plan: Plan, args: tuple, device: torch.device, zero: bool) -> list[Tensor | None]:
    outputs: list[Tensor | None] = []
    for slot in plan.outputs:
        if isinstance(slot, Out):
            outputs.append(slot.zeros(device) if zero else slot.empty(device))
        elif isinstance(slot, Given):
            if zero:
                slot.zero_padding()
            outputs.append(slot.tensor)
        else:
            outputs.append(None if slot is None else _existing(op, slot, args))
    return outputs


def _existing(op: Operator, slot: Existing, args: tuple) -> Tensor:
    value = args[[p.name for p in op.parameters].index(slot.argument)]
    return value if slot.index is None else value[slot.index]


def _run_reference(op: Operator, plan: Plan, args: tuple, device: torch.device) -> list[Tensor | None]:
    positional, keywords = args_by_kind(op, args)
    results = op.leaves(op.reference(*positional, **keywords))
    outputs = _outputs(op, plan, args, device, zero=True)
    for i, (out, result) in enumerate(zip(outputs, results, strict=True)):
        if out is None:
            continue
        if result is None:
            raise RuntimeError(f"{op.name}: the reference returned no result {i}")
        if out.shape != result.shape or out.dtype != result.dtype:
            raise RuntimeError(
                f"{op.name}: reference result {i} is {result.dtype} {list(result.shape)}, "
                f"the plan says {out.dtype} {list(out.shape)}"
            )
        out.copy_(result)
    return outputs


def args_by_kind(op: Operator, args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split complete positional arguments into positional and keyword-only ones."""
    positional = [v for p, v in zip(op.parameters, args, strict=True) if not p.keyword_only]
    return positional, {p.name: v for p, v in zip(op.parameters, args, strict=True) if p.keyword_only}


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
