"""What vLLM's warm-up leaves out of two kernels of its own, compiled so that its JIT monitor can be set to ``error``.

The kernels that gather the keys of a prompt are compiled for each alignment of their tensors. vLLM warms those that
begin at multiples of 16 bytes. In a step with prompts and decodes they begin at the row of the first prompt, which lies
at any multiple of 4 bytes, and so do later parts of the prompts: a server compiles for each new combination.

:func:`watch` notes with which constants the kernels are called, :func:`complete` compiles all alignments for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

KERNELS: dict[str, tuple[tuple[str, ...], str]] = {
    "DequantizeAndGatherKCacheKernel": (("seq_lens", "gather_lens", "block_table"), "offset"),
    "CombineTopkSwaIndicesKernel": (("topk_indices", "query_start_loc", "seq_lens", "gather_lens"), ""),
}
"""Tensors that may begin anywhere, and an integer that a kernel is compiled for, by class."""

ALIGNMENT = 16  # bytes
CLASSES = (1, 2, ALIGNMENT)  # of integers, as Triton tells them apart: one, any, a multiple of 16
VARYING = ("indices_stride", "stride0", "stride1")  # of a launch: not among the constants

_watched: list[Any] = []
_seen: dict[Any, tuple[Any, dict[str, Any]]] = {}


def watch() -> int:
    """Note the calls of the kernels from now on; how many kernels there are."""
    _seen.clear()
    _watched[:] = _vllm()
    for owner in _watched:
        owner.launch = _noting(owner, owner.launch)
    return len(_watched)


def complete() -> dict[str, Any]:
    """Compile every alignment of what was noted, and let the monitor end the server from now on; what was done."""
    from vllm.utils import jit_monitor

    for owner in _watched:
        vars(owner).pop("launch", None)
    variants: dict[str, int] = {}
    for owner, inputs in list(_seen.values()):
        for variant in alignments(type(owner).__name__, inputs):
            owner._warming = True
            try:
                owner(**variant)
            finally:
                owner._warming = False
            variants[type(owner).__name__] = variants.get(type(owner).__name__, 0) + 1
    jit_monitor._mode = "error"
    return {"active": jit_monitor.is_active(), "mode": jit_monitor._mode, "forms": len(_seen), "variants": variants}


def alignments(kernel: str, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Inputs of the call for every alignment of the tensors whose rows are not aligned all by themselves."""
    names, integer = KERNELS[kernel]
    given = [name for name in names if inputs.get(name) is not None]
    free = [name for name in given if inputs[name].stride(0) * inputs[name].dtype.itemsize % ALIGNMENT]
    for aligned in itertools.product((True, False), repeat=len(free)):
        moved = {name: replace(inputs[name], aligned=at) for name, at in zip(free, aligned, strict=True)}
        for value in CLASSES if integer else (0,):
            yield {**inputs, **moved, **({integer: value} if integer else {})}


def _noting(owner: Any, launch: Any) -> Any:
    def noting(spec: Any, inputs: dict[str, Any]) -> Any:
        constants = {name: value for name, value in spec[1].items() if isinstance(value, int | float)}
        fixed = tuple(sorted(item for item in constants.items() if not item[0].endswith(VARYING)))
        lacking = tuple(name for name, value in inputs.items() if value is None)
        if (key := (type(owner).__name__, lacking, fixed)) not in _seen:
            _seen[key] = (owner, {name: _described(value) for name, value in inputs.items()})
        return launch(spec, inputs)

    return noting


def _described(value: Any) -> Any:
    """A tensor as vLLM's warm-up describes one."""
    import torch
    from vllm.model_executor.warmup.jit_warmup_triton_helper import TritonWarmupTensor

    if not isinstance(value, torch.Tensor):
        return value
    aligned = value.data_ptr() % ALIGNMENT == 0
    return TritonWarmupTensor(value.dtype, aligned=aligned, shape=tuple(value.shape), strides=tuple(value.stride()))


def _vllm() -> list[Any]:
    from vllm.models.deepseek_v4.common.ops import cache_utils

    return [value for value in vars(cache_utils).values() if type(value).__name__ in KERNELS]
