"""Runs the CUDA that TileLang generates on CPU tensors: no GPU, driver or nvcc, only g++ and the CUDA headers.

The generated device text is compiled by g++ against NVIDIA's number types, TileLang's own templates and a small
implementation of CUDA's built-ins (``runtime/``); the generated host code checks the arguments and computes the
launch as on a GPU. A fault raises :class:`SimulationError` with the kernel, the thread and the line of the CUDA text:
accesses outside the arguments, misaligned vector accesses, races in shared memory, barriers that some threads never
reach, unknown PTX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tk_serving.plan import Given, Launch, Out, Plan
from tk_serving.simulator.errors import SimulationError
from tk_serving.simulator.kernel import Kernel, Options, lock

__all__ = ["Kernel", "Options", "SimulationError", "load", "options", "run"]

_options = Options()
_kernels: dict[tuple, Kernel] = {}


@contextmanager
def options(*, fiber_seed: int | None = None, poison: bool = True) -> Iterator[None]:
    """Options of the launches inside the ``with`` block.

    Args:
        fiber_seed: run the threads and blocks in a random order of this seed; None keeps their numbers' order.
        poison: fill allocated outputs and scratch tensors with NaN (integers: 0xa5 bytes) before the first launch of
            a call, so that elements which no kernel writes become visible.

    Shared memory and local arrays always start as garbage. For misaligned base addresses make the inputs with
    ``Maker(misalign=True)``: the plan must see them.
    """
    global _options
    saved, _options = _options, replace(_options, fiber_seed=fiber_seed, poison=poison)
    try:
        yield
    finally:
        _options = saved


def load(launch: Launch) -> Kernel:
    """The simulated kernel of a launch: takes the run-time arguments of the ``prim_func`` as CPU tensors and numbers.

    Built on first use, or taken from the cache (``TK_SERVING_SIMULATOR_CACHE``).

    Raises:
        SimulationError: the kernel cannot be built; when called, a fault in the kernel, or arguments that the
            generated host code refuses.
    """
    with lock:
        kernel = _kernels.get(launch.key)
        if kernel is None:
            kernel = _kernels[launch.key] = Kernel(launch.kernel.replace(":", "."), launch.prim_func())
        return kernel


def run(plan: Plan, buffers: Sequence[Tensor | None], args: tuple) -> None:
    """Run every launch of a plan in order; ``buffers`` are its outputs and scratch tensors."""
    slots = (*plan.outputs, *plan.scratch)
    allocated = [(b, slot) for b, slot in zip(buffers, slots, strict=True) if isinstance(slot, Out) and b is not None]
    if _options.poison:
        for buffer, _ in allocated:
            poison(buffer)
    whole = [
        buffer
        for buffer, slot in zip(buffers, slots, strict=True)
        if buffer is not None and isinstance(slot, (Out, Given)) and slot.storage is not None
    ]
    for launch in plan.launches:
        load(launch)(*launch.arguments(buffers, *args), options=_options, whole=whole)


def poison(tensor: Tensor) -> None:
    """Fill the whole storage of a tensor with NaN, or with 0xa5 bytes for other types."""
    byte = 0xFF if tensor.is_floating_point() else 0xA5
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(byte)
