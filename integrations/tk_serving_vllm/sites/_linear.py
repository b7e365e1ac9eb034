"""What vLLM's linear layers want their input quantised as."""

from __future__ import annotations

import functools
from typing import Any

from tk_serving_vllm.sites._handed_over import Cast

TAKES = "takes_rows_handed_over"
"""Marks the method of ``QuantFP8`` that looks for rows that have been quantised already."""


def cast_of(quant: Any) -> Cast | None:
    """The cast of a ``QuantFP8`` layer, or None if it is none of ours: groups of 32 to 128, scales in float32."""
    if quant.static or not quant.is_group_quant or quant.group_size not in (32, 64, 128):
        return None
    if quant.column_major_scales and not quant.tma_aligned_scales:
        return None
    if quant.use_ue8m0 and _packed():
        return None
    return Cast(quant.group_size, bool(quant.column_major_scales), bool(quant.use_ue8m0))


def cast_of_layer(layer: Any) -> Cast | None:
    """The cast that a linear layer makes of its input through the site ``linear-input``, or None."""
    kernel = getattr(getattr(layer, "quant_method", None), "fp8_linear", None)
    if kernel is None or not getattr(kernel, "apply_input_quant", False):
        return None
    method = getattr(kernel.quant_fp8, "_forward_method", None)
    return cast_of(kernel.quant_fp8) if getattr(method, TAKES, False) else None


@functools.cache
def _packed() -> bool:
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

    return DeepGemmQuantScaleFMT.from_oracle() == DeepGemmQuantScaleFMT.UE8M0
