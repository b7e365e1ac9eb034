"""Rows of tokens copied to their positions in the expert-major layout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.layout import WORD
from tk_serving.moe import _contents, _fused
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker

_expect = Expect("expand_to_fused")


def _plan(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, zero_padding: bool) -> Plan:
    _fused.check_rows(_expect, "x", x)
    tokens, hidden = x.shape
    topk, rows = _fused.check_mapping(_expect, tokens, token_topk_to_pos, pos_to_expert)
    _expect.same_device(x=x, token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert)
    units, itemsize = _units(x)
    config = {"hidden": units, "itemsize": itemsize, "num_topk": topk, "sf_columns": 0, "sourced": False}
    launch = Launch("moe.expand_to_fused", {**config, "zero_padding": zero_padding}, _arguments)
    return Plan((Out((rows, hidden), x.dtype),), (launch,) if tokens and rows else ())


def _units(x: Tensor) -> tuple[int, int]:
    """What a row is copied as: number and bytes of its units.

    Rows of whole 16-byte words are bytes: of 16-bit elements the compiler splits the words when it writes them.
    """
    size = x.shape[1] * x.dtype.itemsize
    return (size, 1) if size % WORD == 0 else (x.shape[1], x.dtype.itemsize)


def _arguments(out: Sequence[Tensor], x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, _: bool) -> tuple:
    integer = _fused.INTEGERS[_units(x)[1]]
    return (
        *(x.view(integer), token_topk_to_pos, pos_to_expert, None),
        *(out[0].view(integer), None, None, _fused.is_wide(x, out[0]), 0),
    )


def _verify(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, _: bool) -> None:
    _contents.one_pair_for_each_row(_expect, token_topk_to_pos, pos_to_expert)


def _unspecified(results: list, x: Tensor, positions: Tensor, pos_to_expert: Tensor, zero_padding: bool) -> None:
    _fused.forget_padding(results, pos_to_expert, zero_padding)


def _traffic(x: Tensor, positions: Tensor, pos_to_expert: Tensor, zero_padding: bool) -> int:
    outputs = _plan(x, positions, pos_to_expert, zero_padding).outputs
    return _fused.traffic((x, positions, pos_to_expert), outputs, pos_to_expert, zero_padding)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    topk: int,
    experts: int = 8,
    alignment: int = 4,
    dtype: str = "bfloat16",
    zero_padding: bool = True,
) -> tuple:
    x = make.randn(tokens, hidden, dtype=torch.float32).to(getattr(torch, dtype))
    mapping = _fused.mapping(make, tokens, experts, topk, alignment, drop=topk < 4)
    return (make.value(x), *mapping, zero_padding)


@operator(
    spec="operators.md P26",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    unspecified=_unspecified,
    traffic=_traffic,
    moves_data=True,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "hidden": 64, "topk": 2},
        {"tokens": 9, "hidden": 1280, "topk": 4},
        {"tokens": 5, "hidden": 100, "topk": 3},
        {"tokens": 7, "hidden": 200, "topk": 2, "dtype": "int8"},
        {"tokens": 3, "hidden": 96, "topk": 6, "dtype": "float32", "experts": 12, "alignment": 16},
        {"tokens": 9, "hidden": 1280, "topk": 4, "zero_padding": False},
    ],
    workloads=_fused.workloads(
        lambda m: {
            "hidden": m.hidden_size,
            "topk": m.num_experts_per_tok,
            "experts": m.n_routed_experts,
            "alignment": 128,
        }
    ),
)
def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, zero_padding: bool = True) -> Tensor:
    """Copy the row of every token to its positions; padding rows become zero.

    The mapping comes from ``get_fused_mapping``. Positions outside [0, N) are skipped. A position that two pairs
    name, or that no pair names although ``pos_to_expert`` is not negative there, has unspecified content.

    Args:
        x: [T, H], contiguous, any dtype of 1, 2 or 4 bytes.
        token_topk_to_pos: int32 [T, K].
        pos_to_expert: int32 [N]; negative marks padding.
        zero_padding: False leaves padding rows as they are, for consumers that skip them or their products.

    Returns:
        [N, H] in the dtype of ``x``.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape or layout.
    """
    return _fused.scatter(len(pos_to_expert), x, token_topk_to_pos, pos_to_expert)
