"""Gradient of the router gate with respect to its logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.moe import _contents, _gating
from tk_serving.operator import Existing, Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("moe_topk_gate_backward")


def _plan(
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    grad_topk_weights: Tensor,
    routed_scaling_factor: float,
    scoring_func: str,
    mask: Tensor | None,
    grad_scores_sum: Tensor | None,
    out: Tensor | None,
) -> Plan:
    tokens, experts = _expect.tensor("scores", scores, torch.float32, ("T", "R"))
    _expect.that(1 <= experts <= _gating.MAX_EXPERTS, "scores", f"1 to {_gating.MAX_EXPERTS} experts", experts)
    topk = _expect.tensor("topk_idx", topk_idx, torch.int64, (tokens, "K"))[1]
    _expect.that(1 <= topk <= _gating.MAX_SLOTS, "topk_idx", f"1 to {_gating.MAX_SLOTS} columns", topk)
    _expect.tensor("topk_weights", topk_weights, torch.float32, (tokens, topk))
    _expect.tensor("grad_topk_weights", grad_topk_weights, torch.float32, (tokens, topk))
    _expect.one_of("scoring_func", scoring_func, _gating.SCORING)
    if mask is not None:
        _expect.tensor("mask", mask, torch.bool, (tokens,))
    if grad_scores_sum is not None:
        _expect.that(mask is not None, "mask", "a mask, as grad_scores_sum is given", None)
        sequences = _expect.tensor("grad_scores_sum", grad_scores_sum, torch.float32, ("num_seqs", experts))[0]
        ok = sequences > 0 and tokens % sequences == 0
        _expect.that(ok, "grad_scores_sum", f"a number of sequences that divides the {tokens} tokens", sequences)
    result: Out | Existing = Out((tokens, experts), torch.float32)
    if out is not None:
        _expect.same("out", out, (tokens, experts), torch.float32)
        result = Existing("out")
    _expect.same_device(
        scores=scores,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        grad_topk_weights=grad_topk_weights,
        mask=mask,
        grad_scores_sum=grad_scores_sum,
        out=out,
    )
    config = {
        "num_experts": experts,
        "num_topk": topk,
        "scoring": scoring_func,
        "summed": grad_scores_sum is not None,
        "width": _width(experts) if aligned(scores, out) else 1,
    }
    return Plan((result,), (Launch("moe.gate_backward", config, _arguments),) if tokens else ())


def _width(experts: int) -> int:
    """Neighbouring experts that a lane reads at once, with every lane reading as many."""
    return next(width for width in (4, 2, 1) if width == 1 or experts % (32 * width) == 0)


def _arguments(
    outputs: Sequence[Tensor],
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    grad_topk_weights: Tensor,
    routed_scaling_factor: float,
    scoring_func: str,
    mask: Tensor | None,
    grad_scores_sum: Tensor | None,
    out: Tensor | None,
) -> tuple:
    length = 1 if grad_scores_sum is None else scores.shape[0] // grad_scores_sum.shape[0]
    return (
        *(scores, topk_idx, topk_weights, grad_topk_weights, None if grad_scores_sum is None else mask),
        *(grad_scores_sum, outputs[0], float(routed_scaling_factor), length),
    )


def _finish(flat: Tensor, *arguments: object) -> object:
    return flat if arguments[8] is None else arguments[8]


def _verify(scores: Tensor, topk_idx: Tensor, *_: object) -> None:
    _contents.below(_expect, "topk_idx", topk_idx, scores.shape[1])


def _inputs(
    make: Maker,
    *,
    tokens: int,
    experts: int,
    topk: int,
    scoring: str = "sqrtsoftplus",
    factor: float = 1.5,
    sequences: int = 0,
    missing: bool = False,
    preallocated: bool = False,
) -> tuple:
    scores = make.randn(tokens, experts, scale=3.0)
    ids = make.topk_ids(tokens, experts, topk)
    if scores.device.type != "meta":
        scores = make.value(_gating.scores_of(scores, scoring))
        if missing and tokens > 2:
            ids[0] = -1
            ids[1, 0] = experts
            ids[2, 1:] = ids[2, 0]
            scores[2, 5] = 0
    return (
        *(scores, ids, make.rand(tokens, topk), make.randn(tokens, topk), factor, scoring),
        make.randint(0, 3, tokens).bool() if sequences else None,
        make.randn(sequences, experts) if sequences else None,
        make.rand(tokens, experts) if preallocated else None,
    )


@operator(
    spec="operators.md A2",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    finish=_finish,
    mutates=["out"],
    equality=Close(1e-5, 1e-6),
    cases=[
        {"tokens": 0, "experts": 8, "topk": 2},
        {"tokens": 9, "experts": 384, "topk": 6},
        {"tokens": 12, "experts": 72, "topk": 6, "sequences": 3, "missing": True},
        {"tokens": 6, "experts": 40, "topk": 4, "scoring": "sigmoid", "missing": True, "preallocated": True},
        {"tokens": 6, "experts": 40, "topk": 4, "scoring": "softmax", "sequences": 2},
        {"tokens": 6, "experts": 128, "topk": 8, "sequences": 2, "missing": True, "preallocated": True},
        {"tokens": 6, "experts": 320, "topk": 6, "scoring": "softmax", "sequences": 3, "missing": True},
    ],
    workloads=serving(
        lambda m: {
            "experts": m.n_routed_experts,
            "topk": m.num_experts_per_tok,
            "scoring": m.scoring_func,
            "factor": m.routed_scaling_factor,
        }
    ),
    peers=["tile_kernels"],
)
def moe_topk_gate_backward(
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    grad_topk_weights: Tensor,
    routed_scaling_factor: float,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    grad_scores_sum: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of :func:`moe_topk_gate` with respect to the logits.

    Args:
        scores: float32 [T, R], contiguous: the scores that the gate returned, R <= 4096.
        topk_idx: int64 [T, K], K <= 32: logical ids. Ids outside [0, R) contribute nothing, duplicates add up.
        topk_weights: float32 [T, K]: the weights that the gate returned.
        grad_topk_weights: float32 [T, K].
        routed_scaling_factor: that of the gate.
        scoring_func: ``sqrtsoftplus``, ``sigmoid`` or ``softmax``.
        mask: bool [T], needed with ``grad_scores_sum``.
        grad_scores_sum: float32 [num_seqs, R], T a multiple of num_seqs: gradient of each sequence's sum of normalised
            scores (score / sum of the token's scores) over the tokens inside ``mask``.
        out: preallocated result.

    Returns:
        float32 [T, R]. At a score of 0 the derivative of sqrtsoftplus counts as 0.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout, value or combination.
    """
    tokens, experts = scores.shape
    valid = (topk_idx >= 0) & (topk_idx < experts)
    ids = torch.where(valid, topk_idx, -1)
    total = _gating.scores_at(scores, ids).sum(1, keepdim=True) + _gating.TINY
    weighted = torch.where(valid, grad_topk_weights * topk_weights, 0.0).sum(1, keepdim=True)
    chosen = (routed_scaling_factor * grad_topk_weights - weighted) / total
    grad = torch.zeros_like(scores)
    expert = torch.arange(experts, device=scores.device)
    for k in range(ids.shape[1]):
        grad = torch.where(expert == ids[:, k : k + 1], grad + chosen[:, k : k + 1], grad)
    if grad_scores_sum is not None and mask is not None:
        h = grad_scores_sum.repeat_interleave(tokens // len(grad_scores_sum), dim=0)
        every = scores.sum(1, keepdim=True)
        share = (h - (h * scores).sum(1, keepdim=True) / every) / every
        grad = torch.where(mask[:, None], grad + share, grad)
    if scoring_func == "sigmoid":
        return grad * (scores * (1 - scores))
    if scoring_func == "softmax":
        return scores * (grad - (grad * scores).sum(1, keepdim=True))
    # expm1 keeps the digits that 1 - e^(-u^2) loses for small scores.
    return torch.where(scores == 0, 0.0, grad * (-torch.expm1(-scores * scores) / (2 * scores)))
