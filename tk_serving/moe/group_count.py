"""Histogram of group ids."""

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.moe import _contents, _counting
from tk_serving.operator import Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("group_count")


def _plan(group_idx: Tensor, num_groups: int) -> Plan:
    _expect.at_least("num_groups", num_groups, 1)
    return _counting.plan(_expect, "group_idx", group_idx, num_groups, None)


def _verify(group_idx: Tensor, num_groups: int) -> None:
    _contents.below(_expect, "group_idx", group_idx, num_groups)


def _inputs(make: Maker, *, tokens: int, topk: int, groups: int) -> tuple:
    return make.randint(-2, groups + 2, tokens, topk), groups


@operator(
    spec="operators.md P22",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "topk": 8, "groups": 8},
        {"tokens": 40, "topk": 8, "groups": 8},
        {"tokens": 2000, "topk": 6, "groups": 300},
        {"tokens": 3, "topk": 3, "groups": 1},
    ],
    workloads=serving(lambda m: {"topk": m.num_experts_per_tok, "groups": m.n_routed_experts}),
    peers=["torch_ops"],
)
def group_count(group_idx: Tensor, num_groups: int) -> Tensor:
    """Count how often every group occurs; ids outside [0, num_groups) are skipped.

    Args:
        group_idx: int64 [T, K], contiguous, T * K < 2^31.
        num_groups: G.

    Returns:
        int32 [G].

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or value.
    """
    return _counting.histogram(group_idx, num_groups).int()
