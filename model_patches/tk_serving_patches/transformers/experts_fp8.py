"""Routed experts with FP8 weights in 128x128 blocks: casts fused with what surrounds DeepGEMM's products."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tk_serving import moe, quant
from tk_serving.modeling.moe import Mapping, map_to_experts
from tk_serving_patches.transformers._calls import Seam, is_silu, refusal, verdict
from tk_serving_patches.transformers.experts import around
from tk_serving_patches.transformers.experts import refuses as refuses_experts

EXPERTS_FP8 = Seam(
    "experts-fp8",
    ("get_fused_mapping", "expand_to_fused_and_cast", "swiglu_forward_and_per_token_cast", "reduce_fused"),
)

_BLOCK = 128
_ALIGNMENT = 128  # rows of one expert that DeepGEMM takes at a time


def refuses(experts: Any) -> str | None:
    if reason := refuses_experts(experts):
        return reason
    if experts.gate_up_proj.dtype != torch.float8_e4m3fn:
        return f"weights of {experts.gate_up_proj.dtype}"
    if tuple(experts.block_size or ()) != (_BLOCK, _BLOCK):
        return f"weight blocks of {experts.block_size}"
    if experts.activation_scheme != "dynamic":
        return f"{experts.activation_scheme} scales of the activations"
    other_gates = [getattr(experts, name, None) for name in ("swiglu_alpha", "gate_softcap")]
    if any(value is not None for value in other_gates) or not is_silu(experts.act_fn):
        return "a gate that is not SwiGLU"
    return None


@functools.cache
def _product_refusal(device: torch.device) -> str | None:
    """Why DeepGEMM does not run here. On a CPU a loop over the experts takes its place."""
    if device.type == "cpu":
        return None
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "the FP8 products are written for compute capability 9.0"
    from transformers.integrations.deepgemm import load_deepgemm_kernel

    try:
        alignment = load_deepgemm_kernel().m_alignment
    except Exception as error:
        return f"DeepGEMM cannot be loaded: {error}"
    return None if alignment == _ALIGNMENT else f"DeepGEMM wants rows in multiples of {alignment}"


@verdict
def _refusal(
    device: torch.device, dtype: torch.dtype, size: int, inner: int, experts: int, topk: int, limit: float | None
) -> str | None:
    if dtype != torch.bfloat16:
        return f"activations of {dtype}"

    def empty(*shape: int, of: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    x = empty(1, size, of=torch.bfloat16)
    ids, place = empty(1, topk, of=torch.int64), empty(1, topk, of=torch.int32)
    owner = empty(_ALIGNMENT, of=torch.int32)
    both = empty(_ALIGNMENT, 2 * inner, of=torch.bfloat16)
    gate = {"pos_to_expert": owner, "use_tma_aligned_col_major_sf": True, "swiglu_clamp_value": limit}
    return (
        refusal(moe.get_fused_mapping, device, ids, experts, 0, _ALIGNMENT, force_no_sync=True)
        or refusal(moe.expand_to_fused_and_cast, device, x, "e4m3", _BLOCK, place, owner, True)
        or refusal(quant.swiglu_forward_and_per_token_cast, device, both, "e4m3", _BLOCK, **gate)
        or refusal(moe.reduce_fused, device, empty(_ALIGNMENT, size, of=torch.bfloat16), None, place)
        or _product_refusal(device)
    )


def _reason(experts: Any, x: Tensor, top_k_index: Tensor) -> str | None:
    if torch.is_grad_enabled() and x.requires_grad:
        return "no backward through FP8 weights"
    if reason := refuses(experts):
        return reason
    if not len(x):
        return "no tokens"
    if x.device.type != "cpu" and experts._deepgemm_disabled:
        return "DeepGEMM is switched off for a model on several devices"
    shape = (x.shape[-1], experts.intermediate_dim, experts.num_experts, top_k_index.shape[-1])
    return _refusal(x.device, x.dtype, *shape, _limit(experts))


def _limit(experts: Any) -> float | None:
    limit = getattr(experts, "limit", None)
    return None if limit is None else float(limit)


def _run(experts: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    mapping = map_to_experts(top_k_index.long().contiguous(), experts.num_experts, _ALIGNMENT)
    rows = moe.expand_to_fused_and_cast(x, "e4m3", _BLOCK, mapping.token_topk_to_pos, mapping.pos_to_expert, True)
    both = _product(rows, experts.gate_up_proj, experts.gate_up_proj_scale_inv, mapping)
    rows = quant.swiglu_forward_and_per_token_cast(
        both,
        "e4m3",
        _BLOCK,
        pos_to_token_topk=mapping.pos_to_token_topk,
        topk_weights=top_k_weights.float().contiguous(),
        pos_to_expert=mapping.pos_to_expert,
        use_tma_aligned_col_major_sf=True,
        swiglu_clamp_value=_limit(experts),
    )
    out = _product(rows, experts.down_proj, experts.down_proj_scale_inv, mapping)
    return moe.reduce_fused(out, None, mapping.token_topk_to_pos)


def _product(rows: tuple[Tensor, Tensor], weight: Tensor, weight_sf: Tensor, mapping: Mapping) -> Tensor:
    """``rows @ weight[e].T`` for every expert e, bfloat16 [N, weight.shape[1]]; rows without a pair are undefined."""
    data, sf = rows
    out = torch.empty(len(data), weight.shape[1], dtype=torch.bfloat16, device=data.device)
    if data.device.type == "cpu":
        _loop(data, sf, weight, weight_sf.float(), mapping.pos_to_expert, out)
        return out
    from transformers.integrations.deepgemm import load_deepgemm_kernel

    scaled = (weight, weight_sf.float().contiguous())
    load_deepgemm_kernel().grouped_fp8_fp4_matmul_nt(
        rows, scaled, out, mapping.pos_to_expert, recipe=None, use_psum_layout=False
    )
    return out


def _loop(data: Tensor, sf: Tensor, weight: Tensor, weight_sf: Tensor, owner: Tensor, out: Tensor) -> None:
    values = data.float() * sf.repeat_interleave(_BLOCK, 1)[:, : data.shape[1]]
    out.zero_()
    for expert in owner.unique().tolist():
        if expert >= 0:
            scale = weight_sf[expert].repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
            scaled = weight[expert].float() * scale[: weight.shape[1], : weight.shape[2]]
            mine = owner == expert
            out[mine] = (values[mine] @ scaled.t()).to(out.dtype)


experts_fp8 = around(EXPERTS_FP8, _reason, _run)
"""For ``FP8Experts``."""


def _grouped(*call: Any) -> Tensor:
    from transformers.integrations.finegrained_fp8 import fp8_grouped_mm_experts_forward

    return fp8_grouped_mm_experts_forward(*call)


registered = experts_fp8(_grouped)
"""The function of ``experts_implementation="tilekernels"``; what it does not cover runs as ``grouped_mm``."""
