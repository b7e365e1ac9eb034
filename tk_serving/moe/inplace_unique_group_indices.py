"""Repeated group ids of a token removed in place."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.moe import _contents
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

MAX_GROUPS = 1024

_expect = Expect("inplace_unique_group_indices")


def _plan(group_indices: Tensor, num_groups: int) -> Plan:
    tokens, topk = _expect.tensor("group_indices", group_indices, torch.int64, ("T", "K"))
    _expect.that(topk > 0, "group_indices", "at least one column", [tokens, topk])
    _expect.between("num_groups", num_groups, 1, MAX_GROUPS)
    launch = Launch("moe.inplace_unique_group_indices", {"num_topk": topk}, lambda out, ids, groups: (ids, groups))
    return Plan((), (launch,) if tokens else ())


def _verify(group_indices: Tensor, num_groups: int) -> None:
    _contents.below(_expect, "group_indices", group_indices, num_groups)


def _inputs(make: Maker, *, tokens: int, topk: int, groups: int) -> tuple:
    return make.randint(-2, groups + 2, tokens, topk), groups


@operator(
    spec="operators.md P23",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    mutates=["group_indices"],
    equality=BITWISE,
    cases=[
        {"tokens": 0, "topk": 8, "groups": 8},
        {"tokens": 70, "topk": 8, "groups": 8},
        {"tokens": 5, "topk": 50, "groups": 40},
        {"tokens": 3, "topk": 1, "groups": 2},
    ],
    workloads=serving(lambda m: {"topk": m.num_experts_per_tok, "groups": m.n_group or 8}),
)
def inplace_unique_group_indices(group_indices: Tensor, num_groups: int) -> None:
    """Keep the first occurrence of every group in a row; later ones and ids of no group become -1.

    Negative ids stay as they are.

    Args:
        group_indices: int64 [T, K], contiguous, changed in place.
        num_groups: ids from 0 to below this are groups; at most 1024.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or value.
    """
    ids = group_indices.clone()
    for k in range(ids.shape[1]):
        repeated = (ids[:, :k] == ids[:, k : k + 1]).any(1) & (ids[:, k] >= 0)
        group_indices[:, k] = torch.where(repeated | (ids[:, k] >= num_groups), -1, ids[:, k])
