"""Routing of tokens to experts: in groups (V3 with a correction bias, V2 without), by scores and from a table (V4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.moe.moe_topk_gate import moe_topk_gate
from tk_serving.moe.top2_sum_gate import top2_sum_gate
from tk_serving.moe.topk_gate import topk_gate
from tk_serving.moe.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx
from tk_serving_patches import Function, Site
from tk_serving_patches.comparing import by_id
from tk_serving_patches.positions import in_token_order
from tk_serving_sglang.sites._calls import Call, asked, float_of, left_to_engine, plan

_BIASED = ("top2_sum_gate",)
_SCORED = ("moe_topk_gate",)
_GROUPED = ("topk_sum_and_topk_group_idx", "topk_gate")
_TOPK = "sglang.srt.layers.moe.topk"
_EPS = 1e-20  # SGLang adds it to the sum of the weights


def _logits(gating_output: Tensor) -> Tensor:
    """In a dtype that the gates read."""
    readable = gating_output.dtype in (torch.float32, torch.bfloat16)
    return (gating_output if readable else gating_output.float()).contiguous()


def _biased_grouped_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the V3 router: sigmoid scores, groups by the sum of their two best."""

    def biased_grouped_topk(
        hidden_states: Tensor,
        gating_output: Tensor,
        correction_bias: Tensor,
        topk: int,
        renormalize: bool,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        num_fused_shared_experts: int = 0,
        routed_scaling_factor: float | None = None,
        apply_routed_scaling_factor_on_output: bool | None = False,
    ) -> tuple[Tensor, Tensor]:
        shared = num_fused_shared_experts
        groups = num_expert_group if num_expert_group and num_expert_group > 1 else 0
        scaled = bool(apply_routed_scaling_factor_on_output and routed_scaling_factor)
        gate: tuple[Any, ...] = ()
        reason = None
        if not renormalize:
            reason = "weights are not normalised"
        elif correction_bias.ndim != 1:
            reason = "a bias for every token"
        else:
            gate = (
                _logits(gating_output),
                float_of(correction_bias),
                topk - shared,
                (topk_group or 0) if groups else 0,
                groups,
                shared > 0,
                shared,
                float(routed_scaling_factor) if scaled and routed_scaling_factor else 1.0,
                0,
                1,
                0,
                1,
                "sigmoid",
            )
        run = plan("routing", _BIASED, top2_sum_gate, *gate, reason=reason, int32_ids=True)
        if run is None:
            return original(
                hidden_states,
                gating_output,
                correction_bias,
                topk,
                renormalize,
                num_expert_group,
                topk_group,
                num_fused_shared_experts=num_fused_shared_experts,
                routed_scaling_factor=routed_scaling_factor,
                apply_routed_scaling_factor_on_output=apply_routed_scaling_factor_on_output,
            )
        ids, weights = run()
        if shared and not scaled and routed_scaling_factor not in (None, 0.0, 1.0):
            # The operator gives shared experts the weight 1; SGLang multiplies by the factor later.
            weights[:, topk - shared :].fill_(1.0 / float(routed_scaling_factor or 1.0))
        return weights, ids

    return biased_grouped_topk


def _grouped_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the V2 router: softmax scores, groups by their best."""

    def grouped_topk(
        hidden_states: Tensor,
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        num_fused_shared_experts: int = 0,
        routed_scaling_factor: float | None = None,
        apply_routed_scaling_factor_on_output: bool | None = False,
        scoring_func: str = "softmax",
    ) -> tuple[Tensor, Tensor]:
        tokens, experts = gating_output.shape
        groups, kept = num_expert_group or 1, topk_group or 1
        reason = None
        if num_fused_shared_experts:
            reason = "shared experts among the routed ones, chosen at random"
        elif scoring_func not in ("softmax", "sigmoid"):
            reason = f"{scoring_func} scores"
        elif experts % groups:
            reason = f"{groups} groups of {experts} experts"
        else:
            like = torch.empty(tokens, experts, device="meta")
            device = gating_output.device
            by_group = like.view(tokens, groups, -1)
            answer: Call | str = asked("routing-grouped", topk_gate, like, topk, device=device)
            if not isinstance(answer, str):
                answer = asked("routing-grouped", topk_sum_and_topk_group_idx, by_group, 1, kept, device=device)
            reason = answer if isinstance(answer, str) else None
        if reason is not None:
            left_to_engine(_GROUPED, reason)
            return original(
                hidden_states,
                gating_output,
                topk,
                renormalize,
                num_expert_group,
                topk_group,
                num_fused_shared_experts=num_fused_shared_experts,
                routed_scaling_factor=routed_scaling_factor,
                apply_routed_scaling_factor_on_output=apply_routed_scaling_factor_on_output,
                scoring_func=scoring_func,
            )
        logits = gating_output.float()
        scores = torch.softmax(logits, dim=-1) if scoring_func == "softmax" else logits.sigmoid()
        by_group = scores.view(tokens, groups, -1)
        chosen = topk_sum_and_topk_group_idx(by_group, 1, kept)
        dropped = torch.ones(tokens, groups, 1, dtype=torch.bool, device=scores.device)
        dropped.scatter_(1, chosen[..., None], False)
        ids = topk_gate(by_group.masked_fill(dropped, 0.0).view(tokens, experts), topk)
        weights = scores.gather(1, ids)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _EPS)
        if apply_routed_scaling_factor_on_output and routed_scaling_factor is not None:
            weights = weights * routed_scaling_factor
        return weights, ids.to(torch.int32)

    return grouped_topk


def _is_token(rows: int, count: Tensor | None, device: torch.device) -> Tensor | None:
    """The mask of the rows below a count that lies on the device."""
    if count is None:
        return None
    places = in_token_order(rows, 1, device)
    return (torch.arange(rows, device=device) if places is None else places.view(-1)) < count


def _biased_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the V4 router: sqrtsoftplus (or sigmoid) scores without groups."""

    def biased_topk_jit_kernel_impl(
        hidden_states: Tensor,
        gating_output: Tensor,
        correction_bias: Tensor,
        topk: int,
        renormalize: bool,
        scoring_func: str = "sigmoid",
        num_fused_shared_experts: int = 0,
        routed_scaling_factor: float | None = None,
        num_token_non_padded: Tensor | None = None,
        expert_location_dispatch_info: Any = None,
        apply_routed_scaling_factor_on_output: bool | None = False,
        packed_out: Tensor | None = None,
        sqrtsoftplus_log1p: bool = False,
        router_logits_partials: Tensor | None = None,
        num_shared_append: int = 0,
    ) -> tuple[Tensor, Tensor]:
        shared = num_fused_shared_experts
        scaled = bool(apply_routed_scaling_factor_on_output and routed_scaling_factor)
        reason = None
        if not renormalize:
            reason = "weights are not normalised"
        elif packed_out is not None or router_logits_partials is not None:
            reason = "packed ids" if packed_out is not None else "partial logits"
        elif shared and not scaled and routed_scaling_factor not in (None, 1.0):
            reason = "shared experts with another weight than 1"
        elif correction_bias is None:
            reason = "no correction bias"
        gate: tuple[Any, ...] = ()
        if reason is None:
            gate = (
                _logits(gating_output),
                topk - shared,
                shared > 0,
                shared,
                float(routed_scaling_factor) if scaled and routed_scaling_factor else 1.0,
                0,
                scoring_func,
                _is_token(gating_output.shape[0], num_token_non_padded, gating_output.device),
                float_of(correction_bias),
            )
        run = plan("routing-scores", _SCORED, moe_topk_gate, *gate, reason=reason, int32_ids=True)
        if run is None:
            return original(
                hidden_states,
                gating_output,
                correction_bias,
                topk,
                renormalize,
                scoring_func=scoring_func,
                num_fused_shared_experts=num_fused_shared_experts,
                routed_scaling_factor=routed_scaling_factor,
                num_token_non_padded=num_token_non_padded,
                expert_location_dispatch_info=expert_location_dispatch_info,
                apply_routed_scaling_factor_on_output=apply_routed_scaling_factor_on_output,
                packed_out=packed_out,
                sqrtsoftplus_log1p=sqrtsoftplus_log1p,
                router_logits_partials=router_logits_partials,
                num_shared_append=num_shared_append,
            )
        ids, weights = run()
        return weights, ids

    return biased_topk_jit_kernel_impl


def _hash_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the first layers of V4, whose experts a table names by token."""

    def hash_topk(
        router_logits: Tensor,
        input_ids: Tensor,
        tid2eid: Tensor,
        num_fused_shared_experts: int = 0,
        routed_scaling_factor: float = 1.0,
        scoring_func: str = "sqrtsoftplus",
    ) -> tuple[Tensor, Tensor]:
        shared = num_fused_shared_experts
        # SGLang scales the routed experts later; what it will multiply a shared expert with is taken out here.
        reason = "shared experts with another weight than 1" if shared and routed_scaling_factor != 1.0 else None
        options = {"hash_table": tid2eid, "token_ids": input_ids, "int32_ids": True}
        call = (_logits(router_logits), tid2eid.shape[1], shared > 0, shared, 1.0, 0, scoring_func)
        run = plan("routing-hash", _SCORED, moe_topk_gate, *call, reason=reason, **options)
        if run is None:
            return original(
                router_logits,
                input_ids,
                tid2eid,
                num_fused_shared_experts=num_fused_shared_experts,
                routed_scaling_factor=routed_scaling_factor,
                scoring_func=scoring_func,
            )
        ids, weights = run()
        return weights, ids

    return hash_topk


_UNTIL = "SGLang's registry of kernels dispatches routing."

SITES = (
    Site(
        name="routing",
        operators=_BIASED,
        patches=(Function(f"{_TOPK}:biased_grouped_topk", _biased_grouped_topk, in_order=by_id),),
        why="One launch for scores, groups, top-k, normalisation, scaling and shared experts, for any expert count.",
        how="Takes routers with one bias and normalised weights (V3). What SGLang does with the ids afterwards "
        "(placement, padding, recording) stays.",
        until=_UNTIL,
        sources={"0.5.23": "3ec11dbff31156e2"},
    ),
    Site(
        name="routing-grouped",
        operators=_GROUPED,
        patches=(Function(f"{_TOPK}:grouped_topk", _grouped_topk, in_order=by_id),),
        why="The choice of groups and experts in one launch each; ties go to the lower expert on every device.",
        how="Takes softmax and sigmoid routers without a bias (V2); shared experts in random slots stay with SGLang.",
        until=_UNTIL,
        sources={"0.5.23": "c30cf08e4b42b18b"},
    ),
    Site(
        name="routing-scores",
        operators=_SCORED,
        patches=(Function(f"{_TOPK}:biased_topk_jit_kernel_impl", _biased_topk, in_order=by_id),),
        why="Scores, top-k, normalisation, scaling and the mask of padding rows in one launch.",
        how="Takes sqrtsoftplus and sigmoid routers with a bias and normalised weights (V4). Packed ids for another "
        "kernel's experts stay with SGLang; a NaN ranks last, where SGLang's log1p form ranks it first.",
        until=_UNTIL,
        sources={"0.5.23": "f054833d16a1df02"},
    ),
    Site(
        name="routing-hash",
        operators=_SCORED,
        patches=(Function("sglang.kernels.ops.moe.dsv4:hash_topk", _hash_topk, in_order=by_id),),
        why="The table, the scores of its experts and their normalisation in one launch.",
        how="Takes layers without shared experts among the routed ones, or with a scaling factor of 1.",
        until=_UNTIL,
        sources={"0.5.23": "10622d4edaa78270"},
    ),
)
