"""Routed experts with DeepGEMM's grouped FP8 product: everything around the two products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.moe.expand_to_fused_with_sf import expand_to_fused_with_sf
from tk_serving.moe.get_fused_mapping import get_fused_mapping
from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving.quant.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tk_serving_patches import Function, Site
from tk_serving_vllm import table
from tk_serving_vllm.sites._calls import left_to_engine, local_ids, on, refusal

_OPERATORS = ("get_fused_mapping", "expand_to_fused_with_sf", "swiglu_forward_and_per_token_cast", "reduce_fused")
_GROUP = 128
_SMALLEST_MAXIMUM = 1e-10  # vLLM's lower bound for the maximum of a group


def _unsupported(self: Any, activation: Any, scale_format: str) -> str | None:
    if self.mxfp8 or list(self.block_shape) != [_GROUP, _GROUP]:
        return f"quantisation blocks of {self.block_shape}"
    if activation.value != "silu" or (self.gemm1_alpha, self.gemm1_beta) != (1.0, 0.0):
        return f"activation {activation.value} with alpha {self.gemm1_alpha} and beta {self.gemm1_beta}"
    if scale_format == "UE8M0":
        return "packed UE8M0 scales"
    return None


def _activation_options(scale_format: str, clamp_limit: float | None) -> dict[str, Any]:
    return {
        "use_tma_aligned_col_major_sf": True,
        "round_sf": scale_format == "FLOAT32_CEIL_UE8M0",
        "swiglu_clamp_value": clamp_limit,
        "sf_clamp_min": _SMALLEST_MAXIMUM,
        "zero_padding": False,
        "round_activation": True,
    }


@functools.lru_cache(maxsize=4096)
def _refusal(
    device: torch.device,
    tokens: int,
    topk: int,
    experts: int,
    rows: int,
    alignment: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    scale_format: str,
    clamp_limit: float | None,
    ids_dtype: torch.dtype,
) -> str | None:
    """The first refusal of the four operators, from shapes alone: their inputs do not exist before the first ran."""

    def meta(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    i32, f32, fp8 = torch.int32, torch.float32, torch.float8_e4m3fn
    token_topk_to_pos, pos_to_expert = meta(i32, tokens, topk), meta(i32, rows)
    x = (meta(fp8, tokens, hidden), meta(f32, tokens, hidden // _GROUP))
    return (
        refusal(get_fused_mapping, meta(ids_dtype, tokens, topk), experts, rows, alignment, True, device=device)
        or refusal(expand_to_fused_with_sf, x, _GROUP, token_topk_to_pos, pos_to_expert, True, False, device=device)
        or refusal(
            swiglu_forward_and_per_token_cast,
            meta(dtype, rows, width),
            "e4m3",
            _GROUP,
            pos_to_expert=pos_to_expert,
            device=device,
            **_activation_options(scale_format, clamp_limit),
        )
        or refusal(reduce_fused, meta(dtype, rows, hidden), meta(f32, tokens, topk), token_topk_to_pos, device=device)
    )


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe as engine

        experts, width, hidden = w1.shape
        tokens, topk = topk_ids.shape
        rows, alignment = engine.compute_aligned_M_and_alignment(
            tokens, topk, experts, engine.get_mk_alignment_for_contiguous_layout()[0], expert_tokens_meta
        )
        scale_format = engine.DeepGemmQuantScaleFMT.from_oracle().name
        clamp_limit = self.gemm1_clamp_limit
        reason = table.slower("routed-experts-deepgemm", tokens) or _unsupported(self, activation, scale_format)
        if reason is None and a1q_scale is not None:
            reason = _refusal(
                output.device,
                tokens,
                topk,
                experts,
                rows,
                alignment,
                hidden,
                width,
                output.dtype,
                scale_format,
                clamp_limit,
                torch.int32 if topk_ids.dtype == torch.int32 else torch.int64,
            )
        if reason is not None or a1q_scale is None:
            left_to_engine(_OPERATORS, reason or "no scales of the input")
            original(
                self,
                output,
                hidden_states,
                w1,
                w2,
                topk_weights,
                topk_ids,
                activation,
                global_num_experts,
                expert_map,
                a1q_scale,
                a2_scale,
                workspace13,
                workspace2,
                expert_tokens_meta,
                apply_router_weight_on_input,
            )
            return

        ids = local_ids(topk_ids, expert_map)
        pos_to_expert, _, _, token_topk_to_pos, _, _, _, _ = get_fused_mapping(ids, experts, rows, alignment, True)
        # DeepGEMM reads the expert of every row, and skips blocks of padding rows, which are negative. What it makes of
        # padding rows in other blocks nobody reads, so that these rows need not be zeros.
        x = expand_to_fused_with_sf((hidden_states, a1q_scale), _GROUP, token_topk_to_pos, pos_to_expert, True, False)
        with engine.mk_alignment_scope(alignment):
            inner = engine._resize_cache(workspace2, (rows, width))
            engine.m_grouped_fp8_gemm_nt_contiguous(x, (w1, self.w1_scale), inner, pos_to_expert)
            y = swiglu_forward_and_per_token_cast(
                inner, "e4m3", _GROUP, pos_to_expert=pos_to_expert, **_activation_options(scale_format, clamp_limit)
            )
            outer = engine._resize_cache(workspace2, (rows, hidden))
            engine.m_grouped_fp8_gemm_nt_contiguous(y, (w2, self.w2_scale), outer, pos_to_expert)
        weights = None if apply_router_weight_on_input else topk_weights
        reduce_fused(outer, weights, token_topk_to_pos, out=output)

    return apply


SITES = (
    Site(
        name="routed-experts-deepgemm",
        operators=_OPERATORS,
        patches=(Function("vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe:DeepGemmExperts.apply", _apply),),
        why="One stable mapping serves expansion, both products, activation and reduction; scales are written in the "
        "layout that DeepGEMM reads; padding rows are not written.",
        how="Takes block-FP8 experts with SiLU (Hopper; --moe-backend deep_gemm). MXFP8, packed UE8M0 scales and other "
        "activations stay with vLLM.",
        until="vLLM lets experts choose their permutation, activation and reduction one by one.",
        sources={"0.33.0": "b2c85f457dde052a"},
        unsuitable=on("cuda"),
    ),
)
