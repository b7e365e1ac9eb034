"""Load of the experts, as the auxiliary balance loss counts it."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.moe import _contents, _counting
from tk_serving.operator import Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("aux_fi")


def _plan(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Plan:
    _expect.at_least("num_experts", num_experts, 1)
    _expect.at_least("num_aux_topk", num_aux_topk, 1)
    return _counting.plan(_expect, "topk_idx", topk_idx, num_experts, _divisor)


def _divisor(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> float:
    return float(topk_idx.shape[0] * num_aux_topk)


def _verify(topk_idx: Tensor, num_experts: int, _: int) -> None:
    _contents.below(_expect, "topk_idx", topk_idx, num_experts)


def _inputs(make: Maker, *, tokens: int, topk: int, experts: int) -> tuple:
    return make.randint(-2, experts + 2, tokens, topk), experts, topk


@operator(
    spec="operators.md P21",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "topk": 8, "experts": 8},
        {"tokens": 37, "topk": 8, "experts": 256},
        {"tokens": 2000, "topk": 6, "experts": 300},
    ],
    workloads=serving(lambda m: {"topk": m.num_experts_per_tok, "experts": m.n_routed_experts}),
)
def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    """Share of every expert in the choices of the tokens, relative to an even share.

    Args:
        topk_idx: int64 [T, K], contiguous, T * K < 2^31. Ids outside [0, num_experts) are skipped.
        num_experts: E.
        num_aux_topk: choices that count for each token.

    Returns:
        float32 [E]: ``count * E / (T * num_aux_topk)``, with integer products and one division; zeros for T = 0.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or value.
    """
    if not len(topk_idx):
        return torch.zeros(num_experts, device=topk_idx.device)
    count = (_counting.histogram(topk_idx, num_experts) * num_experts).float()
    return count / torch.tensor(len(topk_idx) * num_aux_topk, device=count.device).float()
