"""Routers: scores, choice, normalisation and scaling in one launch, float32 throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tk_serving import moe
from tk_serving.modeling.moe import gate
from tk_serving_patches.transformers._calls import Seam, refusal, verdict

GATE = Seam("routing", ("moe_topk_gate", "moe_topk_gate_backward"))
GROUPED = Seam("routing", ("top2_sum_gate", "moe_topk_gate", "moe_topk_gate_backward"))
SOFTMAX = Seam("routing", ("topk_gate", "topk_sum_and_topk_group_idx"))


def _logits(experts: int) -> Tensor:
    return torch.empty(1, experts, device="meta")


@verdict
def _gate_refusal(device: torch.device, experts: int, topk: int, scoring: str, vocabulary: int) -> str | None:
    table = {}
    if vocabulary:
        table["hash_table"] = torch.empty(vocabulary, topk, dtype=torch.int64, device="meta")
        table["token_ids"] = torch.empty(1, dtype=torch.int64, device="meta")
    return refusal(moe.moe_topk_gate, device, _logits(experts), topk, False, 0, 1.0, 0, scoring, **table)


@verdict
def _grouped_refusal(device: torch.device, experts: int, topk: int, groups: int, kept: int) -> str | None:
    bias = torch.empty(experts, device="meta")
    options = (topk, kept, groups, False, 0, 1.0, 0, 1, 0, 1, "sigmoid")
    return refusal(moe.top2_sum_gate, device, _logits(experts), bias, *options)


@verdict
def _softmax_refusal(device: torch.device, experts: int, topk: int, groups: int, kept: int) -> str | None:
    reason = refusal(moe.topk_gate, device, _logits(experts), topk)
    if reason is None and groups:
        scores = torch.empty(1, groups, experts // groups, device="meta")
        reason = refusal(moe.topk_sum_and_topk_group_idx, device, scores, 1, kept)
    return reason


def scoring_of(router: Any) -> str:
    """The operators' name of a V4 router's scoring function; empty for one that they do not rank alike."""
    if type(router.score_fn).__name__ == "SqrtSoftplusActivation":
        return "sqrtsoftplus"
    return "sigmoid" if isinstance(router.score_fn, nn.Sigmoid) else ""


def refuses_scoring(router: Any) -> str | None:
    return None if scoring_of(router) else f"scoring function {type(router.score_fn).__name__}"


def topk(original: Callable[..., Any]) -> Callable[..., Any]:
    """For V4's router: score, add the bias, top-k."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scoring = scoring_of(self)
        reason = refuses_scoring(self) or _gate_refusal(hidden_states.device, self.num_experts, self.top_k, scoring, 0)
        if reason is not None:
            GATE.leave(reason)
            return original(self, hidden_states)
        logits = linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        ids, weights = gate(
            logits.float(),
            self.top_k,
            routed_scaling_factor=float(self.routed_scaling_factor),
            scoring_func=scoring,
            bias=self.e_score_correction_bias.float(),
        )
        return logits, weights, ids

    return forward


def by_token(original: Callable[..., Any]) -> Callable[..., Any]:
    """For V4's hash router: the experts by token id."""

    def forward(self: Any, hidden_states: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scoring = scoring_of(self)
        reason = refuses_scoring(self)
        if reason is None and not isinstance(input_ids, Tensor):
            reason = "no token ids"
        if reason is None:
            rows = len(self.tid2eid)
            reason = _gate_refusal(hidden_states.device, self.num_experts, self.top_k, scoring, rows)
        if reason is not None:
            GATE.leave(reason)
            return original(self, hidden_states, input_ids)
        logits = linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        ids, weights = gate(
            logits.float(),
            self.top_k,
            routed_scaling_factor=float(self.routed_scaling_factor),
            scoring_func=scoring,
            hash_table=self.tid2eid,
            token_ids=input_ids.reshape(-1),
        )
        return logits, weights, ids

    return forward


def grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the router of V3 and V3.2: sigmoid, the best groups by the sum of two, top-k."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups, kept = self.num_group, self.topk_group
        if groups > 1:
            reason = _grouped_refusal(hidden_states.device, self.num_experts, self.top_k, groups, kept)
        else:
            reason = _gate_refusal(hidden_states.device, self.num_experts, self.top_k, "sigmoid", 0)
        if reason is not None:
            GROUPED.leave(reason)
            return original(self, hidden_states)
        rows = hidden_states.reshape(-1, self.hidden_dim)
        logits = linear(rows.type(torch.float32), self.weight.type(torch.float32))
        ids, weights = gate(
            logits.float(),  # autocast lowers the product
            self.top_k,
            routed_scaling_factor=float(self.routed_scaling_factor),
            scoring_func="sigmoid",
            bias=self.e_score_correction_bias.float(),
            num_groups=groups,
            num_topk_groups=kept,
        )
        if not self.norm_topk_prob:
            weights = logits.sigmoid().gather(1, ids) * self.routed_scaling_factor
        return logits, weights, ids

    return forward


def refuses_method(router: Any) -> str | None:
    known = ("greedy", "group_limited_greedy")
    return None if router.topk_method in known else f"topk_method {router.topk_method!r}"


def softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    """For V2's router: softmax, the best groups by their maximum, top-k; weights are not normalised."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grouped = self.topk_method == "group_limited_greedy"
        groups, kept = (self.num_group, self.topk_group) if grouped else (0, 0)
        reason = refuses_method(self) or _softmax_refusal(
            hidden_states.device, self.num_experts, self.top_k, groups, kept
        )
        if reason is not None:
            SOFTMAX.leave(reason)
            return original(self, hidden_states)
        rows = hidden_states.reshape(-1, self.hidden_dim)
        logits = linear(rows.type(torch.float32), self.weight.type(torch.float32))
        scores = logits.softmax(dim=-1, dtype=torch.float32)
        ids = _choose(scores.detach(), self.top_k, groups, kept)
        return logits, scores.gather(1, ids) * self.routed_scaling_factor, ids

    return forward


def _choose(scores: Tensor, topk: int, groups: int, kept: int) -> Tensor:
    if groups:
        grouped = scores.view(len(scores), groups, -1)
        best = moe.topk_sum_and_topk_group_idx(grouped, 1, kept)
        chosen = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
        scores = grouped.masked_fill(~chosen[..., None], 0.0).view(scores.shape)
    return moe.topk_gate(scores, topk)
