"""Quantised rows of tokens copied to their positions in the expert-major layout, with their scales."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.moe import _contents, _fused
from tk_serving.operator import Launch, Out, Plan, Quantized, operator
from tk_serving.workloads import Maker

_expect = Expect("expand_to_fused_with_sf")


def _plan(
    x: Quantized,
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool,
    zero_padding: bool,
) -> Plan:
    data, sf = x
    _fused.check_rows(_expect, "x[0]", data)
    tokens, hidden = data.shape
    _expect.one_of("num_per_channels", num_per_channels, (32, 128))
    blocks = -(-hidden * (2 if data.dtype == torch.int8 else 1) // num_per_channels)
    _expect.dtype("x[1]", sf, torch.float32, torch.int32)
    packed = sf.dtype == torch.int32
    columns = -(-blocks // 4) if packed else blocks
    _expect.shape("x[1]", sf, (tokens, columns))
    _expect.that(
        use_tma_aligned_col_major_sf or not packed,
        "use_tma_aligned_col_major_sf",
        "True, as the scales are packed",
        use_tma_aligned_col_major_sf,
    )
    topk, rows = _fused.check_mapping(_expect, tokens, token_topk_to_pos, pos_to_expert)
    _expect.same_device(**{"x[0]": data, "x[1]": sf}, token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert)
    config = {"hidden": hidden, "itemsize": data.dtype.itemsize, "num_topk": topk, "zero_padding": zero_padding}
    launches: tuple[Launch, ...]
    scratch: tuple[Out, ...] = ()
    if _fused.gathers_sf(tokens, use_tma_aligned_col_major_sf, topk * columns):
        sources = Launch("moe.expand_to_fused:sources", {"num_topk": topk}, _arguments_of_sources)
        launches = (
            sources,
            Launch("moe.expand_to_fused", {**config, "sf_columns": columns, "sourced": True}, _arguments),
        )
        scratch = (Out((rows,), torch.int32),)
    else:
        launches = (Launch("moe.expand_to_fused", {**config, "sf_columns": columns, "sourced": False}, _arguments),)
    outputs = (Out((rows, hidden), data.dtype), _fused.sf_out(rows, columns, sf.dtype, use_tma_aligned_col_major_sf))
    return Plan(outputs, launches, scratch) if tokens and rows else Plan(outputs)


def _arguments(
    out: Sequence[Tensor],
    x: Quantized,
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    column_major: bool,
    _: bool,
) -> tuple:
    integer = _fused.INTEGERS[x[0].dtype.itemsize]
    token_of = out[2] if len(out) > 2 else None
    return (
        *(x[0].view(integer), token_topk_to_pos, pos_to_expert, x[1].view(torch.int32)),
        *(out[0].view(integer), _fused.sf_words(out[1], column_major)),
        *(token_of, _fused.is_wide(x[0], out[0]), int(column_major)),
    )


def _arguments_of_sources(out: Sequence[Tensor], x: Quantized, npc: int, positions: Tensor, *_: Any) -> tuple:
    return positions, out[2]


def _verify(x: Quantized, num_per_channels: int, token_topk_to_pos: Tensor, pos_to_expert: Tensor, *_: bool) -> None:
    _contents.one_pair_for_each_row(_expect, token_topk_to_pos, pos_to_expert)


def _unspecified(results: list, x: Quantized, npc: int, positions: Tensor, pos_to_expert: Tensor, *flags: bool) -> None:
    _fused.forget_padding(results, pos_to_expert, flags[-1])


def _traffic(x: Quantized, npc: int, positions: Tensor, pos_to_expert: Tensor, *flags: bool) -> int:
    outputs = _plan(x, npc, positions, pos_to_expert, *flags).outputs
    return _fused.traffic((*x, positions, pos_to_expert), outputs, pos_to_expert, flags[-1])


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    topk: int,
    experts: int = 8,
    alignment: int = 4,
    npc: int = 128,
    dtype: str = "float8_e4m3fn",
    packed: bool = False,
    column_major: bool = True,
    sf_column_major: bool = False,
    zero_padding: bool = True,
) -> tuple:
    """The scales come in ``sf_column_major`` layout and go out in ``column_major`` layout."""
    blocks = -(-hidden // npc)
    columns = -(-blocks // 4) if packed else blocks
    data = make.randint(0, 127, tokens, hidden // (2 if dtype == "int8" else 1), dtype=torch.int8)
    sf = make.randint(0, 2**31 - 1, *((columns, tokens) if sf_column_major else (tokens, columns)), dtype=torch.int32)
    sf = sf if packed else sf.view(torch.float32)
    return (
        (data.view(getattr(torch, dtype)), sf.t() if sf_column_major else sf),
        npc,
        *_fused.mapping(make, tokens, experts, topk, alignment, drop=topk < 4),
        column_major,
        zero_padding,
    )


@operator(
    spec="operators.md P27",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    unspecified=_unspecified,
    traffic=_traffic,
    moves_data=True,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "hidden": 256, "topk": 2},
        {"tokens": 9, "hidden": 1024, "topk": 4, "sf_column_major": True},
        {"tokens": 9, "hidden": 576, "topk": 3, "column_major": False, "alignment": 1},
        {"tokens": 5, "hidden": 416, "topk": 2, "npc": 32, "dtype": "int8", "packed": True, "alignment": 3},
        {"tokens": 300, "hidden": 544, "topk": 3, "npc": 32, "dtype": "int8", "alignment": 3},
        {"tokens": 260, "hidden": 160, "topk": 2, "npc": 32, "packed": True, "sf_column_major": True},
        {"tokens": 9, "hidden": 1024, "topk": 4, "zero_padding": False},
        {"tokens": 9, "hidden": 576, "topk": 3, "column_major": False, "alignment": 3, "zero_padding": False},
        {"tokens": 260, "hidden": 544, "topk": 3, "npc": 32, "zero_padding": False},
    ],
    workloads=_fused.workloads(
        lambda m: {
            "hidden": m.hidden_size,
            "topk": m.num_experts_per_tok,
            "experts": m.n_routed_experts,
            "alignment": 128,
            "npc": m.quant_group,
        }
    ),
    peers=["vllm"],
)
def expand_to_fused_with_sf(
    x: Quantized,
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    zero_padding: bool = True,
) -> Quantized:
    """Copy the quantised row and the scales of every token to its positions; padding rows become zero.

    As :func:`expand_to_fused`; padding rows have scale 0.

    Args:
        x: data [T, H], contiguous, any dtype of 1, 2 or 4 bytes (int8 holds two channels a byte); and scales in any
            layout, float32 [T, ceil(C / npc)] or packed int32 [T, ceil(ceil(C / npc) / 4)] for C channels.
        num_per_channels: npc, channels that share a scale: 32 or 128.
        token_topk_to_pos: int32 [T, K].
        pos_to_expert: int32 [N]; negative marks padding.
        use_tma_aligned_col_major_sf: return the scales column-major, every column starting on 16 bytes; required for
            packed scales.
        zero_padding: False leaves the data of padding rows as they are; their scales are 0 all the same.

    Returns:
        Data [N, H] and scales [N, columns], with the dtypes of ``x``.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or combination.
    """
    data, sf = (_fused.scatter(len(pos_to_expert), part, token_topk_to_pos, pos_to_expert) for part in x)
    return data, sf
