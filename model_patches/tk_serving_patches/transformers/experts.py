"""Routed experts: one mapping in place of sort, gather and scatter around the grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving import moe
from tk_serving.modeling.moe import expand, map_to_experts, reduce, row_weights
from tk_serving.modeling.quant import FORMATS, swiglu
from tk_serving_patches.transformers._calls import Seam, is_silu, refusal, verdict
from tk_serving_patches.transformers.swiglu import rows_refusal

EXPERTS = Seam("experts", ("get_fused_mapping", "expand_to_fused", "swiglu_forward", "swiglu_backward", "reduce_fused"))

NAME = "tilekernels"
"""Value of ``experts_implementation``."""

_REPLACED = (None, "eager", "grouped_mm", "batched_mm", NAME)


def implementation(experts: Any) -> str | None:
    return getattr(experts.config, "_experts_implementation", None)


def refuses(experts: Any) -> str | None:
    chosen = implementation(experts)
    if chosen not in _REPLACED:
        return f"experts_implementation={chosen!r} is chosen"
    if not experts.has_gate:
        return "experts without a gate"
    if not isinstance(experts.gate_up_proj, Tensor) or type(experts.gate_up_proj).__name__ == "DTensor":
        return "weights that are sharded or not tensors"
    return None


def swiglu_limit(experts: Any) -> tuple[bool, float | None]:
    """Is the gate of these experts SwiGLU as the operator computes it, and with which limit."""
    gate = type(experts)._apply_gate
    known = gate.__module__.startswith("transformers.") and is_silu(getattr(experts, "act_fn", None))
    if known and gate.__qualname__ == "_default_apply_gate":
        return True, None
    if known and gate.__qualname__ == "DeepseekV4Experts._apply_gate":
        return True, float(experts.limit)
    return False, None


@verdict
def _refusal(device: torch.device, dtype: torch.dtype, size: int, experts: int, topk: int) -> str | None:
    if dtype not in FORMATS:
        return f"weights of {dtype}"
    ids = torch.empty(1, topk, dtype=torch.int64, device="meta")
    place = torch.empty(1, topk, dtype=torch.int32, device="meta")
    owner = torch.empty(topk, dtype=torch.int32, device="meta")
    rows = torch.empty(topk, size, dtype=dtype, device="meta")
    return (
        refusal(moe.get_fused_mapping, device, ids, experts, topk, 1, force_no_sync=True)
        or refusal(moe.expand_to_fused, device, rows[:1], place, owner)
        or refusal(moe.reduce_fused, device, rows, None, place)
    )


def _reason(experts: Any, x: Tensor, top_k_index: Tensor) -> str | None:
    reason = refuses(experts)
    if reason is None and not len(x):
        reason = "no tokens"
    if reason is None:
        dtype, topk = experts.gate_up_proj.dtype, top_k_index.shape[-1]
        reason = _refusal(x.device, dtype, x.shape[-1], experts.num_experts, topk)
        known, limit = swiglu_limit(experts)
        if reason is None and known:
            width = experts.gate_up_proj.shape[-1 if experts.is_transposed else -2]
            reason = rows_refusal(x.device, dtype, width, limit, torch.is_grad_enabled())
    return reason


def _run(experts: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    from transformers.integrations.moe import _grouped_linear

    mapping = map_to_experts(top_k_index.long().contiguous(), experts.num_experts)

    def product(rows: Tensor, weight: Tensor, name: str) -> Tensor:
        bias = getattr(experts, f"{name}_bias")[mapping.pos_to_expert.clamp(min=0).long()] if experts.has_bias else None
        rows = _grouped_linear(rows, weight, mapping.expert_end, bias=bias, is_transposed=experts.is_transposed)
        return rows.contiguous()

    weights = top_k_weights.float()
    rows = expand(x.to(experts.gate_up_proj.dtype).contiguous(), mapping)
    rows = product(rows, experts.gate_up_proj, "gate_up_proj")
    norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
    known, limit = swiglu_limit(experts)
    if known and norm is None and not experts.has_bias:
        # The second product is linear: weighting its input costs nothing, and its gradient is the narrower one.
        rows = swiglu(rows, clamp_value=limit, row_weights=row_weights(weights, mapping))
        return reduce(product(rows, experts.down_proj, "down_proj"), None, mapping).to(x.dtype)
    rows = swiglu(rows, clamp_value=limit) if known else experts._apply_gate(rows)
    rows = product(rows, experts.down_proj, "down_proj")
    if norm is not None:
        rows = norm(rows)
    return reduce(rows, weights, mapping).to(x.dtype)


def around(seam: Seam, reason: Callable[..., str | None], run: Callable[..., Tensor]) -> Callable[..., Any]:
    """For a forward of experts: ``run`` in its place, or itself where ``reason`` has something against it, counted."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            against = reason(self, hidden_states, top_k_index)
            if against is not None:
                seam.leave(against)
                return original(self, hidden_states, top_k_index, top_k_weights)
            return run(self, hidden_states, top_k_index, top_k_weights)

        return forward

    return make


experts = around(EXPERTS, _reason, _run)
"""For the experts modules of every model."""


def _grouped(*call: Any) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(*call)


registered = experts(_grouped)
"""The function of ``experts_implementation="tilekernels"``; what it does not cover runs as ``grouped_mm``."""
