"""Expert ids as seen by one tensor-parallel rank."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.moe import _contents
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mask_indices_by_tp")


def _plan(indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> Plan:
    shape = _expect.tensor("indices", indices, (torch.int64, torch.int32), ("T", "K"))
    _expect.that(shape[1] > 0, "indices", "at least one column", list(shape))
    _expect.at_least("num_ep_ranks", num_ep_ranks, 1)
    _expect.between("n", n, num_ep_ranks, 2**31 - 1)
    _expect.at_least("num_tp_ranks", num_tp_ranks, 1)
    _expect.between("tp_rank", tp_rank, 0, num_tp_ranks - 1)
    dtype = "int64" if indices.dtype == torch.int64 else "int32"
    launch = Launch(
        "moe.mask_indices_by_tp",
        {"dtype": dtype},
        lambda out, indices, n, num_ep_ranks, tp_rank, num_tp_ranks: (
            *(indices.view(-1), out[0].view(-1)),
            *(n, n // num_ep_ranks, tp_rank, num_tp_ranks),
        ),
    )
    return Plan((Out(shape, indices.dtype),), (launch,) if shape[0] else ())


def _verify(indices: Tensor, n: int, *_: int) -> None:
    _contents.below(_expect, "indices", indices, n)


def _inputs(
    make: Maker, *, tokens: int, topk: int, n: int, ep: int, tp_rank: int, tp: int, dtype: torch.dtype = torch.int64
) -> tuple:
    return make.randint(-2, n + 2, tokens, topk, dtype=dtype), n, ep, tp_rank, tp


@operator(
    spec="operators.md P24",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "topk": 8, "n": 16, "ep": 4, "tp_rank": 0, "tp": 2},
        {"tokens": 40, "topk": 8, "n": 16, "ep": 4, "tp_rank": 0, "tp": 2},
        {"tokens": 40, "topk": 8, "n": 16, "ep": 4, "tp_rank": 1, "tp": 2},
        {"tokens": 99, "topk": 6, "n": 391, "ep": 8, "tp_rank": 3, "tp": 4, "dtype": torch.int32},
    ],
    workloads=serving(
        lambda m: {"topk": m.num_experts_per_tok, "n": m.n_routed_experts, "ep": 8, "tp_rank": 1, "tp": 2}
    ),
)
def mask_indices_by_tp(indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> Tensor:
    """Renumber expert ids for one tensor-parallel rank; ids that belong to another rank become -1.

    The n experts are split evenly over the expert-parallel ranks, and consecutive blocks of ``n // num_ep_ranks``
    experts belong to the tensor-parallel ranks in turn. The ids of one rank become consecutive. With n = 16,
    4 expert-parallel and 2 tensor-parallel ranks, rank 0 keeps the ids 0-3 and 8-11 as 0-7.

    Args:
        indices: int32 or int64 [T, K], contiguous. Ids outside [0, n) become -1.
        n: number of physical experts over all expert-parallel ranks, num_ep_ranks <= n < 2^31.
        num_ep_ranks: expert-parallel ranks.
        tp_rank: 0 <= tp_rank < num_tp_ranks.
        num_tp_ranks: tensor-parallel ranks.

    Returns:
        Same shape and dtype as ``indices``.

    Raises:
        TypeError: dtype.
        ValueError: wrong layout or a rank out of range.
    """
    per = n // num_ep_ranks
    valid = (indices >= 0) & (indices < n) & (indices // per % num_tp_ranks == tp_rank)
    local = indices - tp_rank * per
    local = local - local // (per * num_tp_ranks) * (per * num_tp_ranks - per)
    return torch.where(valid & (local >= 0), local, -1)
