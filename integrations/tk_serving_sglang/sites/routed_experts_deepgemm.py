"""Expansion and reduction around DeepGEMM's grouped products (``--moe-runner-backend deep_gemm``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.moe.expand_to_fused import expand_to_fused
from tk_serving.moe.expand_to_fused_with_sf import expand_to_fused_with_sf
from tk_serving.moe.get_fused_mapping import get_fused_mapping
from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving_patches import Function, Site
from tk_serving_patches.positions import constant
from tk_serving_sglang.sites._calls import Call, asked, left_to_engine, on, plan, scale_layout

_SCATTER = ("get_fused_mapping", "expand_to_fused_with_sf")
_REDUCE = ("reduce_fused",)
_KERNELS = "sglang.kernels.ops.moe.ep_moe_kernels"
_MANY = 1024  # tokens; measured: faster at 64, slower at 4096


def _ep_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def ep_scatter(
        recv_x: Tensor,
        recv_x_scale: Tensor | None,
        recv_topk: Tensor,
        num_recv_tokens_per_expert: Tensor,
        num_valid_tokens_per_expert: Tensor,
        expert_start_loc: Tensor,
        output_tensor: Tensor,
        output_tensor_scale: Tensor,
        m_indices: Tensor,
        output_index: Tensor,
        scale_ue8m0: bool = False,
        quant_block_size: int = 128,
        expert_alignment: int = 128,
        expert_start: int = 0,
    ) -> None:
        rows, experts = output_tensor.shape[0], num_recv_tokens_per_expert.shape[0]
        quantised = recv_x_scale is not None and recv_x.dtype != torch.bfloat16
        ids = recv_topk - expert_start if expert_start else recv_topk
        mapping = (ids.contiguous(), experts, rows, expert_alignment, True)
        options = scale_layout(output_tensor_scale, rows, scale_ue8m0) if quantised else {}
        reason = options if isinstance(options, str) else None
        column_major = not isinstance(options, str) and "use_tma_aligned_col_major_sf" in options
        function: Any = expand_to_fused_with_sf if quantised else expand_to_fused
        x: tuple[Any, ...] = ((recv_x, recv_x_scale), quant_block_size) if quantised else (recv_x,)
        # Products skip rows whose owner is -1, and nothing gathers them: SGLang leaves them as they are, too.
        layout = (column_major, False) if quantised else (False,)
        if reason is None and (m_indices.shape[0] != rows or output_index.dtype != torch.int32):
            reason = "positions of another form"
        place: Call | str = reason or asked("routed-experts-scatter", get_fused_mapping, *mapping)
        expand: Call | str = ""
        if not isinstance(place, str):
            expand = asked("routed-experts-scatter", function, *x, output_index, m_indices, *layout)
        if isinstance(place, str) or isinstance(expand, str):
            left_to_engine(_SCATTER, place if isinstance(place, str) else str(expand))
            original(
                recv_x,
                recv_x_scale,
                recv_topk,
                num_recv_tokens_per_expert,
                num_valid_tokens_per_expert,
                expert_start_loc,
                output_tensor,
                output_tensor_scale,
                m_indices,
                output_index,
                scale_ue8m0=scale_ue8m0,
                quant_block_size=quant_block_size,
                expert_alignment=expert_alignment,
                expert_start=expert_start,
            )
            return
        # The owner of every row is what DeepGEMM reads, the position of every choice what the reduction reads.
        place.into([m_indices, None, None, output_index, None, None, None])
        expand.into([output_tensor, output_tensor_scale] if quantised else [output_tensor])

    return ep_scatter


def _post_reorder(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_reorder_deepgemm(
        down_output: Tensor,
        output: Tensor,
        src2dst: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        topk: int,
        num_tokens: int,
        hidden_size: int,
        routed_scaling_factor: float,
        lora_delta: Tensor | None = None,
    ) -> None:
        rows: Any = down_output.view(-1, hidden_size)
        weights = topk_weights.float().contiguous()
        if routed_scaling_factor != 1.0:
            # As a scale of every row it costs no launch, but more than one where there are many rows.
            few = num_tokens < _MANY
            factor = constant(routed_scaling_factor, rows.shape[0], 1, rows.device) if few else None
            if factor is None:
                weights = weights * routed_scaling_factor
            else:
                rows = (rows, factor.view(-1))
        reason = "a LoRA" if lora_delta is not None else None
        call = (rows, weights, src2dst.view(num_tokens, topk))
        run = plan("routed-experts-reduce", _REDUCE, reduce_fused, *call, reason=reason, tokens=num_tokens, out=output)
        if run is not None:
            run()
            return
        original(
            down_output,
            output,
            src2dst,
            topk_ids,
            topk_weights,
            topk,
            num_tokens,
            hidden_size,
            routed_scaling_factor,
            lora_delta=lora_delta,
        )

    return post_reorder_deepgemm


_UNTIL = "SGLang lets a runner choose its permutation and reduction."

SITES = (
    Site(
        name="routed-experts-scatter",
        operators=_SCATTER,
        # SGLang places the rows of an expert in the order in which its atomics come: nothing to compare with.
        patches=(Function(f"{_KERNELS}:ep_scatter", _ep_scatter, comparable=False),),
        why="Rows of an expert in the order of their tokens, run after run the same.",
        how="One stable mapping instead of atomic counters; takes contiguous layouts, quantised or not. Masked layouts "
        "(small batches) stay with SGLang.",
        until=_UNTIL,
        sources={"0.5.23": "943c34011cec99af"},
        unsuitable=on("cuda"),
    ),
    Site(
        name="routed-experts-reduce",
        operators=_REDUCE,
        patches=(Function(f"{_KERNELS}:post_reorder_deepgemm", _post_reorder),),
        why="Sums in f32 with one rounding, wide loads; contiguous and masked layouts.",
        how="The scaling factor is a scale of every row; LoRA stays with SGLang.",
        until=_UNTIL,
        sources={"0.5.23": "f2d6c3a425c5a140"},
        unsuitable=on("cuda"),
    ),
)
