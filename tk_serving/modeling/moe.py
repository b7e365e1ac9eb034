"""Differentiable routing, expansion and reduction of mixture-of-experts layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tk_serving import moe

_DOT_ROWS = 4096  # rows of a weight gradient taken at a time: bounds the float32 copies


class Mapping(NamedTuple):
    """Where the pairs (token, expert) lie in a buffer that is ordered by expert; see ``moe.get_fused_mapping``.

    Attributes:
        pos_to_expert: int32 [N], -1 for rows without a pair.
        pos_to_token_topk: int32 [N], the pair t * K + k of a row, -1 for none.
        token_topk_to_pos: int32 [T, K], the row of a pair, -1 for none.
        expert_end: int32 [E], the row after the last of every expert.
    """

    pos_to_expert: Tensor
    pos_to_token_topk: Tensor
    token_topk_to_pos: Tensor
    expert_end: Tensor


def map_to_experts(topk_idx: Tensor, num_experts: int, alignment: int = 1) -> Mapping:
    """Order pairs by expert, without a host synchronisation.

    Args:
        topk_idx: int64 [T, K], T > 0; an id outside [0, num_experts) takes no row.
        num_experts: E.
        alignment: an expert's rows are padded to a multiple of it. With 1 there are T * K rows.
    """
    rows = topk_idx.numel() if alignment == 1 else 0
    pos_to_expert, _, pos_to_token_topk, token_topk_to_pos, _, expert_end, _, _ = moe.get_fused_mapping(
        topk_idx, num_experts, rows, alignment, force_no_sync=True
    )
    return Mapping(pos_to_expert, pos_to_token_topk, token_topk_to_pos, expert_end)


def gate(
    logits: Tensor,
    num_topk: int,
    *,
    routed_scaling_factor: float = 1.0,
    scoring_func: str = "sqrtsoftplus",
    bias: Tensor | None = None,
    num_groups: int = 0,
    num_topk_groups: int = 0,
    hash_table: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token; the weights are differentiable in the logits.

    Args:
        logits: float32 [T, E], contiguous.
        num_topk: K.
        routed_scaling_factor: multiplies the normalised weights.
        scoring_func: ``sqrtsoftplus``, ``sigmoid`` or ``softmax``.
        bias: float32 [E], added to the scores for the choice alone.
        num_groups: groups of experts, 0 for none; with groups ``moe.top2_sum_gate`` runs, else ``moe.moe_topk_gate``.
        num_topk_groups: groups kept.
        hash_table: int32 or int64 [V, K]: the experts by token id; replaces the choice by scores.
        token_ids: int32 or int64 [T]: the rows of ``hash_table``.

    Returns:
        Ids, int64 [T, K], and weights, float32 [T, K].
    """
    options = (num_topk, routed_scaling_factor, scoring_func, num_groups, num_topk_groups)
    return _Gate.apply(logits, bias, hash_table, token_ids, *options)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        hash_table: Tensor | None,
        token_ids: Tensor | None,
        num_topk: int,
        factor: float,
        scoring: str,
        num_groups: int,
        num_kept: int,
    ) -> tuple[Tensor, Tensor]:
        scores = None
        if num_groups > 1:
            if bias is None:
                bias = logits.new_zeros(logits.shape[1])
            groups = (num_kept, num_groups)
            ids, weights = moe.top2_sum_gate(logits, bias, num_topk, *groups, False, 0, factor, 0, 1, 0, 1, scoring)
        else:
            if ctx.needs_input_grad[0]:
                scores = torch.empty_like(logits)
            ids, weights = moe.moe_topk_gate(
                *(logits, num_topk, False, 0, factor, 0, scoring),
                bias=bias,
                scores=scores,
                hash_table=hash_table,
                token_ids=token_ids,
            )
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.scoring = factor, scoring
        # Scores of the other gate follow from the logits.
        ctx.has_scores = scores is not None
        ctx.save_for_backward(logits if scores is None else scores, ids, weights)
        return ids, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        nothing = (None,) * 8
        if grad_weights is None:
            return None, *nothing
        saved, ids, weights = ctx.saved_tensors
        scores = saved if ctx.has_scores else _scores(saved, ctx.scoring)
        of_logits = moe.moe_topk_gate_backward(
            scores, ids, weights, grad_weights.contiguous(), ctx.factor, scoring_func=ctx.scoring
        )
        return of_logits, *nothing


def _scores(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "sigmoid":
        return logits.sigmoid()
    if scoring == "softmax":
        return logits.softmax(-1)
    return torch.nn.functional.softplus(logits).sqrt()


def expand(x: Tensor, mapping: Mapping) -> Tensor:
    """Copy the row of every token to the rows of its pairs: [T, H] -> [N, H]; rows without a pair are zero."""
    return _Expand.apply(x, mapping.token_topk_to_pos, mapping.pos_to_expert)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(token_topk_to_pos)
        return moe.expand_to_fused(x, token_topk_to_pos, pos_to_expert)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (token_topk_to_pos,) = ctx.saved_tensors
        return moe.reduce_fused(grad.contiguous(), None, token_topk_to_pos), None, None


def row_weights(topk_weights: Tensor, mapping: Mapping) -> Tensor:
    """The weight of every row's pair, 0 for rows without one: float32 [T, K] -> [N]."""
    pair = mapping.pos_to_token_topk
    return torch.where(pair >= 0, topk_weights.flatten()[pair.clamp(min=0).long()], 0.0)


def reduce(x: Tensor, topk_weights: Tensor | None, mapping: Mapping) -> Tensor:
    """Sum the rows of every token's pairs, weighted if weights are given: [N, H] -> [T, H], float32 inside.

    Args:
        x: bfloat16 or float32 [N, H], H a multiple of 8. Rows without a pair are not read.
        topk_weights: float32 [T, K], or None for weights of 1.
        mapping: the mapping that made the rows.
    """
    return _Reduce.apply(x, topk_weights, mapping.token_topk_to_pos, mapping.pos_to_expert, mapping.pos_to_token_topk)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor | None,
        token_topk_to_pos: Tensor,
        pos_to_expert: Tensor,
        pos_to_token_topk: Tensor,
    ) -> Tensor:
        rows = None if topk_weights is None else x
        ctx.save_for_backward(rows, topk_weights, token_topk_to_pos, pos_to_expert, pos_to_token_topk)
        return moe.reduce_fused(x, topk_weights, token_topk_to_pos)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, topk_weights, token_topk_to_pos, pos_to_expert, pos_to_token_topk = ctx.saved_tensors
        of_rows = moe.expand_to_fused(grad.contiguous(), token_topk_to_pos, pos_to_expert)
        if topk_weights is None:
            return of_rows, None, None, None, None
        of_weights = None
        if ctx.needs_input_grad[1]:
            dots = torch.cat([_dots(a, b) for a, b in zip(x.split(_DOT_ROWS), of_rows.split(_DOT_ROWS), strict=True)])
            there = token_topk_to_pos >= 0
            of_weights = torch.where(there, dots[token_topk_to_pos.clamp(min=0).long()], 0.0)
        mapping = Mapping(pos_to_expert, pos_to_token_topk, token_topk_to_pos, pos_to_expert)
        of_x = (of_rows * row_weights(topk_weights, mapping)[:, None]).to(x.dtype)
        return of_x, of_weights, None, None, None


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() * b.float()).sum(1)
