"""Rows of tokens quantised and copied to their positions in the expert-major layout, in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.moe import _contents, _fused
from tk_serving.moe.expand_to_fused_with_sf import expand_to_fused_with_sf
from tk_serving.operator import Launch, Out, Plan, Quantized, operator
from tk_serving.quant import casting, samples, scales
from tk_serving.quant.per_token_cast import per_token_cast
from tk_serving.workloads import Maker, Model, variants

FORMATS = ("e4m3", "e2m1")

_expect = Expect("expand_to_fused_and_cast")


def _plan(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    zero_padding: bool,
) -> Plan:
    _expect.one_of("fmt", fmt, FORMATS)
    source = casting.check_input(_expect, x, None, fmt)
    _expect.one_of("num_per_channels", num_per_channels, (32, 128))
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    topk, rows = _fused.check_mapping(_expect, source.tokens, token_topk_to_pos, pos_to_expert)
    _expect.same_device(x=x, token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert)
    config = {
        "hidden": source.hidden,
        "x": source.config["x"],
        "aligned": aligned(x),
        "fmt": fmt,
        "npc": num_per_channels,
        "layout": layout,
        "round_sf": round_sf,
        "num_topk": topk,
        "sourced": _fused.gathers_sf(source.tokens, use_tma_aligned_col_major_sf),
        "zero_padding": zero_padding,
    }
    launches: tuple[Launch, ...] = (Launch("moe.expand_to_fused_and_cast", config, _arguments),)
    scratch: tuple[Out, ...] = ()
    outputs = (
        casting.data_out(fmt, rows, source.hidden),
        scales.sf_out(layout, rows, -(-source.hidden // num_per_channels)),
    )
    if config["sourced"]:
        columns = outputs[1].shape[1]
        launches = (*launches, _fused.gather_sf(columns, 3, _sf_and_experts))
        scratch = (Out((source.tokens, columns), torch.int32), Out((rows,), torch.int32))
    return Plan(outputs, launches, scratch) if source.tokens and rows else Plan(outputs)


def _arguments(
    out: Sequence[Tensor],
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    column_major: bool,
    *_: bool,
) -> tuple:
    data = out[0].view(_fused.INTEGERS[1])
    sourced = _fused.gathers_sf(len(x), column_major)
    sf, token_of = (out[2], out[3]) if sourced else (_fused.sf_words(out[1], column_major), None)
    return x, token_topk_to_pos, pos_to_expert, data, sf, token_of, _fused.is_wide(data), int(column_major)


def _sf_and_experts(
    out: Sequence[Tensor], x: Tensor, fmt: str, num_per_channels: int, positions: Tensor, experts: Tensor, *_: bool
) -> tuple[Tensor, Tensor]:
    return out[2], experts


def _verify(x: Tensor, fmt: str, num_per_channels: int, positions: Tensor, pos_to_expert: Tensor, *_: bool) -> None:
    _contents.one_pair_for_each_row(_expect, positions, pos_to_expert)


def _unspecified(
    results: list, x: Tensor, fmt: str, npc: int, positions: Tensor, pos_to_expert: Tensor, *flags: bool
) -> None:
    _fused.forget_padding(results, pos_to_expert, flags[-1])


def _traffic(x: Tensor, fmt: str, npc: int, positions: Tensor, pos_to_expert: Tensor, *flags: bool) -> int:
    outputs = _plan(x, fmt, npc, positions, pos_to_expert, *flags).outputs
    return _fused.traffic((x, positions, pos_to_expert), outputs, pos_to_expert, flags[-1])


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    topk: int,
    experts: int = 8,
    alignment: int = 4,
    fmt: str = "e4m3",
    npc: int = 128,
    dtype: str = "bfloat16",
    values: str = "normal",
    pad: int = 0,
    column_major: bool = True,
    round_sf: bool = False,
    packed: bool = False,
    zero_padding: bool = True,
) -> tuple:
    x = samples.matrix(make, tokens, hidden, getattr(torch, dtype), values, pad)
    positions = _fused.mapping(make, tokens, experts, topk, alignment, drop=topk < 4)
    return x, fmt, npc, *positions, column_major, round_sf, packed, zero_padding


def _engine_forms(model: Model) -> list[dict]:
    """V4's experts in FP8 on Hopper: scales are powers of two."""
    if not model.hc_mult or model.quant_group == 32:
        return []
    sizes = {"hidden": model.hidden_size, "topk": model.num_experts_per_tok, "experts": model.n_routed_experts}
    return [{**sizes, "alignment": 128, "round_sf": True, "zero_padding": False}]


@operator(
    spec="operators.md P1 followed by P27",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    unspecified=_unspecified,
    traffic=_traffic,
    moves_data=True,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "hidden": 512, "topk": 2},
        {"tokens": 9, "hidden": 1104, "topk": 4, "values": "special"},
        {"tokens": 7, "hidden": 576, "topk": 3, "column_major": False, "alignment": 1, "pad": 8},
        {"tokens": 5, "hidden": 1040, "topk": 6, "round_sf": True, "packed": True, "alignment": 3, "values": "special"},
        {"tokens": 5, "hidden": 208, "topk": 2, "npc": 32, "round_sf": True, "packed": True, "dtype": "float32"},
        {"tokens": 5, "hidden": 1040, "topk": 4, "npc": 32, "fmt": "e2m1", "values": "special"},
        {"tokens": 260, "hidden": 528, "topk": 3, "alignment": 3},
        {"tokens": 260, "hidden": 208, "topk": 2, "npc": 32, "round_sf": True, "packed": True},
        {"tokens": 9, "hidden": 1104, "topk": 4, "zero_padding": False},
        {"tokens": 260, "hidden": 528, "topk": 3, "alignment": 3, "zero_padding": False},
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
    variants=variants(_engine_forms),
    peers=["vllm"],
)
def expand_to_fused_and_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    zero_padding: bool = True,
) -> Quantized:
    """Quantise the row of every token and copy it to its positions; padding rows become zero with scale 0.

    The bytes of ``per_token_cast`` followed by ``expand_to_fused_with_sf``, without the quantised tokens in between:
    what a grouped GEMM over expert-major rows takes. Rows that neither a pair names nor ``pos_to_expert`` marks as
    padding have unspecified content.

    Args:
        x: bfloat16 or float32 [T, H], rows may be strided, H a multiple of 16.
        fmt: ``e4m3`` or ``e2m1`` (two values in an int8).
        num_per_channels: channels that share a scale: 32 or 128. The last group may be short.
        token_topk_to_pos: int32 [T, K]; positions outside [0, N) are skipped.
        pos_to_expert: int32 [N]; negative marks padding.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes.
        round_sf: scales are powers of two.
        use_packed_ue8m0: four exponents in an int32; needs both flags above.
        zero_padding: False leaves the data of padding rows as they are; their scales are 0 all the same.

    Returns:
        Data, float8_e4m3fn [N, H] or int8 [N, H / 2], and scales, float32 [N, ceil(H / npc)] or int32
        [N, ceil(H / npc / 4)].

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or combination.
    """
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    quantised = per_token_cast.operator.reference(x, fmt, num_per_channels, None, *flags)
    return expand_to_fused_with_sf.operator.reference(
        quantised, num_per_channels, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf
    )
