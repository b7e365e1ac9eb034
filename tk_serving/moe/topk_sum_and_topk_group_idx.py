"""The best groups of experts by their largest scores."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.moe import _gating
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

MAX_GROUPS = 32

_expect = Expect("topk_sum_and_topk_group_idx")


def _plan(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Plan:
    tokens, groups, size = _expect.tensor("scores", scores, torch.float32, ("T", "G", "Eg"))
    _expect.that(1 <= groups <= MAX_GROUPS, "scores", f"1 to {MAX_GROUPS} groups", groups)
    _expect.one_of("num_topk_sum", num_topk_sum, (1, 2))
    _expect.that(size >= num_topk_sum, "scores", f"groups of at least {num_topk_sum} experts", size)
    _expect.between("num_topk_groups", num_topk_groups, 1, groups)
    launch = Launch(
        "moe.topk_sum_and_topk_group_idx",
        {"num_groups": groups, "group_size": size, "num_topk_sum": num_topk_sum, "num_topk_groups": num_topk_groups},
        lambda out, scores, *_: (scores, out[0]),
    )
    return Plan((Out((tokens, num_topk_groups), torch.int64),), (launch,) if tokens else ())


def _inputs(
    make: Maker, *, tokens: int, groups: int, size: int, summed: int, kept: int, values: str = "normal"
) -> tuple:
    scores = make.randn(tokens, groups, size)
    if values == "ties":
        scores = make.randint(-2, 3, tokens, groups, size).float()
    elif values == "special" and scores.device.type != "meta":
        rare = make.value(torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3e38, -3e38]))
        scores = make.place(rare[make.randint(0, 7, tokens, groups, size)])
    return scores, summed, kept


@operator(
    spec="operators.md P18",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "groups": 8, "size": 32, "summed": 2, "kept": 4},
        {"tokens": 30, "groups": 8, "size": 32, "summed": 2, "kept": 4},
        {"tokens": 9, "groups": 32, "size": 2, "summed": 2, "kept": 32, "values": "ties"},
        {"tokens": 9, "groups": 5, "size": 70, "summed": 2, "kept": 3, "values": "special"},
        {"tokens": 9, "groups": 3, "size": 1, "summed": 1, "kept": 2, "values": "special"},
    ],
    workloads=serving(
        lambda m: (
            {"groups": m.n_group, "size": m.n_routed_experts // m.n_group, "summed": 2, "kept": m.topk_group}
            if m.n_group
            else None
        )
    ),
)
def topk_sum_and_topk_group_idx(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    """Indices of the groups with the largest score, best first; ties go to the lower group.

    The score of a group is its largest value, or the float32 sum of its two largest values, where equal maxima both
    count. Infinite values count as the largest finite value, NaN as the lowest.

    Args:
        scores: float32 [T, G, Eg], contiguous, G <= 32.
        num_topk_sum: 1 or 2 values of each group.
        num_topk_groups: groups to choose, at most G.

    Returns:
        int64 [T, num_topk_groups].

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or value.
    """
    best = _gating.finite(scores).topk(num_topk_sum, dim=2).values
    total = best[..., 0] if num_topk_sum == 1 else best[..., 0] + best[..., 1]
    return _gating.descending(total)[:, :num_topk_groups]
