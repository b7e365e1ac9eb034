"""What the adapters share: may our operator run this call, and counting the calls that stay with SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tk_serving.operator import tensors_of
from tk_serving_patches import warm
from tk_serving_patches.calls import left_to_engine, refusal_here
from tk_serving_sglang.table import measured

__all__ = ["float_of", "left_to_engine", "on", "refusal", "runs", "scale_layout", "symmetric"]

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


def refusal(site: str, function: Any, *args: Any, tokens: int = 0, **kwargs: Any) -> str | None:
    """Why SGLang's own code has to run a call, or None; such a call is noted for the warm-up.

    Args:
        site: its name, for the table of measurements.
        function: the operator.
        args: its arguments.
        tokens: of the call, if its first tensor has another number of rows.
        kwargs: further arguments of the operator.
    """
    tokens = tokens or next(tensors_of(args)).shape[0]
    reason = measured.slower(site, tokens) or refusal_here(function, *args, **kwargs)
    if reason is None:
        kwargs.pop("device", None)
        warm.note(function, tokens, args, kwargs)
    return reason


def runs(
    site: str, operators: tuple[str, ...], function: Any, *args: Any, reason: str | None = None, **kwargs: Any
) -> bool:
    """Whether an operator runs this call; if not, SGLang's own code does, and the call is counted with why.

    Args:
        site: its name, for the table of measurements.
        operators: names of the site's operators.
        function: the operator that is asked.
        args: its arguments.
        reason: what the adapter itself has against it.
        kwargs: further arguments of the operator.
    """
    reason = reason or refusal(site, function, *args, **kwargs)
    if reason is None:
        return True
    left_to_engine(operators, reason)
    return False


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
