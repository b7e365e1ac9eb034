"""Stable top-k of router scores."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

MAX_EXPERTS = 4096

_expect = Expect("topk_gate")


def _plan(scores: Tensor, num_topk: int) -> Plan:
    tokens, experts = _expect.tensor("scores", scores, torch.float32, ("T", "E"))
    _expect.that(1 <= experts <= MAX_EXPERTS, "scores", f"1 to {MAX_EXPERTS} experts", experts)
    _expect.between("num_topk", num_topk, 1, experts)
    launch = Launch(
        "moe.topk_gate", {"num_experts": experts, "num_topk": num_topk}, lambda out, scores, _: (scores, out[0])
    )
    return Plan((Out((tokens, num_topk), torch.int64),), (launch,) if tokens else ())


def _inputs(make: Maker, *, tokens: int, experts: int, topk: int, values: str = "normal") -> tuple:
    scores = make.randn(tokens, experts)
    if values == "ties":
        scores = make.randint(-2, 3, tokens, experts).float()
    elif values == "special" and tokens:
        rare = make.value(torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0]))
        scores = rare[make.randint(0, 5, tokens, experts)]
        scores[0] = float("nan")
        scores[-1, 1:] = -float("inf")
    return scores, topk


@operator(
    spec="operators.md P17",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "experts": 8, "topk": 2},
        {"tokens": 1, "experts": 256, "topk": 8},
        {"tokens": 5, "experts": 72, "topk": 6, "values": "ties"},
        {"tokens": 9, "experts": 384, "topk": 6, "values": "special"},
        {"tokens": 3, "experts": 40, "topk": 40, "values": "special"},
        {"tokens": 2, "experts": 1, "topk": 1},
    ],
    workloads=serving(lambda m: {"experts": m.n_routed_experts, "topk": m.num_experts_per_tok}),
    peers=["torch_ops", "tile_kernels"],
)
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """Indices of the largest scores of each row: the first columns of a stable descending sort.

    Equal scores go to the lower index; +0 and -0 are equal; NaN ranks as -inf. The indices of a row are distinct.

    Args:
        scores: float32 [T, E], contiguous, 1 <= E <= 4096.
        num_topk: K, 1 <= K <= E.

    Returns:
        int64 [T, K], contiguous.

    Raises:
        TypeError: scores is not float32.
        ValueError: wrong shape or layout, or K out of range.
    """
    ranked = torch.where(scores.isnan(), -torch.inf, scores)
    return ranked.sort(dim=1, descending=True, stable=True).indices[:, :num_topk]
