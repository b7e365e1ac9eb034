"""What the adapters share: may our operator run this call, and counting the calls that stay with SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tk_serving.operator import tensors_of
from tk_serving_patches import warm
from tk_serving_patches.calls import Call, ask, left_to_engine
from tk_serving_sglang.table import measured

__all__ = ["Call", "asked", "float_of", "left_to_engine", "on", "plan", "scale_layout", "symmetric"]

_floats = WeakIdKeyDictionary()


def on(platform: str) -> Callable[[], str | None]:
    """For ``Site.unsuitable``: the site belongs to one platform of SGLang."""

    def unsuitable() -> str | None:
        from sglang.srt.utils import is_cuda

        here = "cuda" if is_cuda() else "cpu"
        return None if here == platform else f"for {platform}; this platform is {here}"

    return unsuitable


def float_of(weight: Tensor) -> Tensor:
    """A float32 copy of a small weight, made once for each load of the weight; the weight itself if it is float32."""
    if weight.dtype == torch.float32:
        return weight
    version, copy = _floats.get(weight, (None, None))
    if version != weight._version or copy.device != weight.device:
        copy = weight.float()
        _floats[weight] = weight._version, copy
    return copy


def asked(
    site: str, function: Any, *args: Any, tokens: int = 0, device: torch.device | None = None, **kwargs: Any
) -> Call | str:
    """The planned call of an operator, noted for the warm-up, or why SGLang's own code has to run it.

    Args:
        site: its name, for the table of measurements.
        function: the operator.
        args: its arguments.
        tokens: of the call, if its first tensor has another number of rows.
        device: where it runs, if its arguments are meta tensors.
        kwargs: further arguments of the operator.
    """
    first = next(tensors_of(args))
    tokens = tokens or first.shape[0]
    answer: Call | str = measured.slower(site, tokens) or ask(function, device or first.device, *args, **kwargs)
    if not isinstance(answer, str):
        warm.note(function, tokens, args, kwargs)
    return answer


def plan(
    site: str, operators: tuple[str, ...], function: Any, *args: Any, reason: str | None = None, **kwargs: Any
) -> Call | None:
    """The planned call of a site, or None: SGLang's own code runs it, which is counted with why.

    Args:
        site: its name, for the table of measurements.
        operators: names of the site's operators.
        function: the operator that is asked.
        args: its arguments.
        reason: what the adapter itself has against it.
        kwargs: further arguments of the operator, and of :func:`asked`.
    """
    answer: Call | str = reason or asked(site, function, *args, **kwargs)
    if isinstance(answer, str):
        left_to_engine(operators, answer)
        return None
    return answer


def symmetric() -> str | None:
    """The reason to leave an allocation to SGLang: its result has to lie in NCCL's symmetric memory."""
    from sglang.srt.distributed.device_communicators.pynccl_allocator import is_symmetric_memory_enabled
    from sglang.srt.layers.dp_attention import is_allocation_symmetric

    if not is_symmetric_memory_enabled() or not is_allocation_symmetric():
        return None
    return "the result has to lie in symmetric memory"


def scale_layout(scales: Tensor, rows: int, powers_of_two: bool) -> dict[str, Any] | str:
    """Options of the operators that write scales as SGLang laid them out, or why there are none.

    Args:
        scales: float32 [T, G], or int32 [T, ceil(G / 4)] for packed UE8M0.
        rows: T.
        powers_of_two: SGLang's ``scale_ue8m0``.
    """
    packed = scales.dtype == torch.int32
    if scales.is_contiguous() and not packed:
        return {"round_sf": powers_of_two}
    padded = -(-rows // 4) * 4
    if scales.dim() != 2 or scales.stride(0) != 1 or scales.stride(1) != padded:
        return f"scales with strides {list(scales.stride())}"
    room = scales.untyped_storage().nbytes() // scales.itemsize - scales.storage_offset()
    if room < padded * scales.shape[1]:
        return "scales without padding rows"
    return {"use_tma_aligned_col_major_sf": True, "round_sf": powers_of_two, "use_packed_ue8m0": packed}
