"""Routed experts on a CPU: the whole chain from mapping to reduction around one matrix product for each expert."""

from __future__ import annotations

import torch
from torch import Tensor

from tk_serving.moe.expand_to_fused import expand_to_fused
from tk_serving.moe.get_fused_mapping import get_fused_mapping
from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving.quant.swiglu_forward import swiglu_forward
from tk_serving_patches.calls import refusal

OPERATORS = ("get_fused_mapping", "expand_to_fused", "swiglu_forward", "reduce_fused")
FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Dtypes of activations, and the operators' names for them."""

_LIBRARY = torch.library.Library("tk_serving_patches", "DEF")
_LIBRARY.define("grouped_product(Tensor x, Tensor weight, Tensor expert_end) -> Tensor")


def _grouped_product(x: Tensor, weight: Tensor, expert_end: Tensor) -> Tensor:
    """``x[rows of e] @ weight[e].T`` for every expert e; the rows of an expert end at ``expert_end[e]``."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(expert_end.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
        start = end
    out[start:] = 0  # rows of no expert
    return out


_LIBRARY.impl("grouped_product", _grouped_product, "CPU")
torch.library.register_fake(
    "tk_serving_patches::grouped_product", lambda x, w, end: x.new_empty(x.shape[0], w.shape[1]), lib=_LIBRARY
)


def experts(
    x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, limit: float | None = None
) -> Tensor:
    """Routed experts of one layer.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gate above up; ``w2``: [E, H, I].
        topk_ids: [T, K], negative for none.
        topk_weights: f32 [T, K], or None for weights of 1.
        limit: of SwiGLU's inputs (``swiglu_limit``), or None.

    Returns:
        [T, H].
    """
    tokens, topk = topk_ids.shape
    pos_to_expert, _, _, token_topk_to_pos, _, expert_end, _, _ = get_fused_mapping(
        topk_ids.long(), w13.shape[0], tokens * topk, 1, force_no_sync=True
    )
    grouped_product = torch.ops.tk_serving_patches.grouped_product
    rows = grouped_product(expand_to_fused(x, token_topk_to_pos, pos_to_expert), w13, expert_end)
    activated = swiglu_forward(rows, FORMATS[x.dtype], clamp_value=limit)
    rows = grouped_product(activated, w2, expert_end)
    return reduce_fused(rows, topk_weights, token_topk_to_pos)


def weights_refusal(w13: Tensor, w2: Tensor) -> str | None:
    """Why the operators do not run experts with these weights, or None."""
    if w13.dtype not in FORMATS:
        return f"weights of dtype {w13.dtype}"
    rows = torch.empty(1, w13.shape[1], dtype=w13.dtype, device="meta")
    place = torch.empty(1, 1, dtype=torch.int32, device="meta")
    return refusal(swiglu_forward, w13.device, rows, FORMATS[w13.dtype]) or refusal(
        reduce_fused, w13.device, torch.empty(1, w2.shape[1], dtype=w2.dtype, device="meta"), None, place
    )
