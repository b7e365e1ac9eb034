"""SwiGLU between the two matrix products of an expert, quantised for the second."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE, Steps
from tk_serving.expect import Expect
from tk_serving.operator import Out, Plan, Quantized, operator
from tk_serving.quant import casting, gating, scales
from tk_serving.quant.formats import FORMATS
from tk_serving.workloads import Maker, Model, Workload, serving, variants

GROUPS = (32, 64, 128)

_expect = Expect("swiglu_forward_and_per_token_cast")
_names = {"positions": "pos_to_token_topk", "experts": "pos_to_expert", "clamp": "swiglu_clamp_value"}


def _plan(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    swiglu_clamp_value: float | None,
    clamped_count: Tensor | None,
    sf_clamp_min: float | None,
    zero_padding: bool,
    round_activation: bool,
) -> Plan:
    _expect.one_of("fmt", fmt, ("e4m3",))
    _expect.together(pos_to_token_topk=pos_to_token_topk, topk_weights=topk_weights)
    rows = _rows(pos_to_token_topk, topk_weights, pos_to_expert, swiglu_clamp_value, clamped_count)
    n, hidden = rows.check(_expect, x, 128, _names)
    rows.check_counts(_expect, 3, "swiglu_clamp_value")
    gating.check_rounding(_expect, x, round_activation)
    casting.check_channels(_expect, num_per_channels, hidden, GROUPS)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if use_tma_aligned_col_major_sf:
        whole = num_per_channels == hidden
        _expect.that(not whole, "use_tma_aligned_col_major_sf", "False with num_per_channels = H", True)
    if sf_clamp_min is not None:
        _expect.positive("sf_clamp_min", sf_clamp_min)
    floor = FORMATS[fmt].floor if sf_clamp_min is None else sf_clamp_min
    how = (fmt, num_per_channels, layout, round_sf, floor, zero_padding, round_activation)
    launch = gating.launch(x, rows, _rows_of, *how)
    results = (casting.data_out(fmt, n, hidden), scales.sf_out(layout, n, -(-hidden // num_per_channels)))
    refusal = None
    if num_per_channels == hidden > gating.HELD * 8192:
        refusal = "one scale for each row of more than 65536 columns"
    return Plan(results, (launch,) if n else (), refusal=refusal)


def _rows(
    positions: Tensor | None, weights: Tensor | None, experts: Tensor | None, clamp: float | None, counts: Tensor | None
) -> gating.Rows:
    return gating.Rows(positions=positions, topk_weights=weights, experts=experts, clamp=clamp, counts=counts)


def _rows_of(x: Tensor, fmt: str, npc: int, *arguments: Any) -> gating.Rows:
    return _rows(*arguments[:3], *arguments[6:8])


def _traffic(x: Tensor, *arguments: Any) -> int:
    """Padding rows are not read, and with ``zero_padding=False`` not written but for their scales."""
    others = [x, *(t for t in arguments if isinstance(t, Tensor))]
    read = sum(t.numel() * t.element_size() for t in others)
    data, sf = (out.num_bytes for out in _plan(x, *arguments).outputs if isinstance(out, Out))
    experts, zero_padding = arguments[4], arguments[11]
    if experts is None or x.device.type == "meta":
        return read + data + sf
    dead = int((experts < 0).sum())
    row = x.shape[1] * x.element_size() + (0 if zero_padding else data // max(1, len(x)))
    return read + data + sf - dead * row


def _unspecified(results: list, *arguments: object) -> None:
    experts, zero_padding = arguments[5], arguments[12]
    if not zero_padding and isinstance(experts, Tensor):
        results[0].view(torch.uint8)[experts < 0] = 0


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    npc: int,
    topk: int = 0,
    experts: bool = False,
    dtype: str = "bfloat16",
    column_major: bool = False,
    round_sf: bool = False,
    packed: bool = False,
    clamp: float | None = None,
    counted: bool = False,
    sf_clamp_min: float | None = None,
    values: str = "normal",
    gaps: bool = True,
    zero_padding: bool = True,
    rounded: bool = False,
) -> tuple:
    x = make.randn(tokens, 2 * hidden, dtype=getattr(torch, dtype), scale=2.0)
    if values == "special" and tokens > 3:
        x[0, ::7], x[1, hidden + 3], x[2, 5], x[3] = 0.0, float("nan"), float("inf"), -30.0
    positions = weights = owners = None
    lowest = -1 if gaps else 0
    if topk:
        source = -(-tokens // topk)
        positions = make.randint(lowest, source * topk + (1 if gaps else 0), tokens, dtype=torch.int32)
        weights = make.rand(source, topk)
    if experts:
        owners = make.randint(lowest, 4, tokens, dtype=torch.int32)
    counts = make.value(torch.tensor([5, 0, 2**40])) if counted else None
    flags = (column_major, round_sf, packed)
    return x, "e4m3", npc, positions, weights, owners, *flags, clamp, counts, sf_clamp_min, zero_padding, rounded


def _serving(model: Model) -> dict[str, object]:
    mxfp8 = model.quant_group == 32
    return {
        "hidden": model.moe_intermediate_size,
        "npc": model.quant_group,
        "topk": model.num_experts_per_tok,
        "experts": True,
        "column_major": True,
        "round_sf": mxfp8,
        "packed": mxfp8,
        "clamp": model.swiglu_limit,
        "gaps": False,
    }


def _engine_forms(model: Model) -> list[dict[str, object]]:
    """On Hopper: without weights; as V4's shared experts and routed ones in FP8, or V3's behind either product.

    vLLM rounds the activation to bfloat16, SGLang does not and may have V4's scales in rows.
    """
    if model.quant_group == 32:
        return []
    v4 = model.hc_mult > 0
    rows: dict[str, object] = {"hidden": model.moe_intermediate_size, "npc": model.quant_group}
    rows |= {"clamp": model.swiglu_limit, "column_major": v4, "round_sf": v4}
    forms = [rows, {**rows, "experts": True, "column_major": True, "zero_padding": False}]
    by_row = [{**rows, "column_major": False, "round_sf": round_sf} for round_sf in (False, True) if v4]
    return [*({**form, "rounded": rounded} for form in forms for rounded in (False, True)), *by_row]


def _many_rows() -> tuple[Workload, ...]:
    """The forms that leave padding rows, with as many rows as regions of all experts have."""
    return tuple(
        dataclasses.replace(one, label=f"{one.label}-rows", tokens=(gating.LISTED_ROWS.start,))
        for one in variants(_engine_forms)
        if not one.params.get("zero_padding", True)
    )


@operator(
    spec="operators.md P13",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=(Steps(), Steps(), BITWISE),
    mutates=("clamped_count",),
    unspecified=_unspecified,
    traffic=_traffic,
    moves_data=True,
    cases=[
        {"tokens": 0, "hidden": 256, "npc": 128, "column_major": True},
        {"tokens": 6, "hidden": 384, "npc": 128, "values": "special"},
        {"tokens": 7, "hidden": 640, "npc": 128, "topk": 3, "experts": True, "column_major": True, "clamp": 1.5},
        {
            "tokens": 9,
            "hidden": 384,
            "npc": 32,
            "topk": 2,
            "experts": True,
            "column_major": True,
            "round_sf": True,
            "packed": True,
            "clamp": 0.5,
            "counted": True,
            "values": "special",
        },
        {"tokens": 5, "hidden": 1280, "npc": 1280, "dtype": "float32", "experts": True, "clamp": 1.0, "counted": True},
        {"tokens": 5, "hidden": 256, "npc": 256, "topk": 2, "round_sf": True, "sf_clamp_min": 1e-12},
        {"tokens": 6, "hidden": 384, "npc": 128, "values": "special", "column_major": True, "rounded": True},
        {"tokens": 5, "hidden": 256, "npc": 256, "topk": 2, "clamp": 1.5, "rounded": True},
        {"tokens": 39, "hidden": 640, "npc": 128, "experts": True, "column_major": True, "zero_padding": False},
        {"tokens": 41, "hidden": 384, "npc": 64, "topk": 3, "experts": True, "zero_padding": False},
        {
            "tokens": 17,
            "hidden": 768,
            "npc": 32,
            "topk": 2,
            "experts": True,
            "column_major": True,
            "round_sf": True,
            "packed": True,
            "clamp": 0.5,
            "counted": True,
            "zero_padding": False,
        },
        {"tokens": 5, "hidden": 1280, "npc": 1280, "experts": True, "zero_padding": False},
    ],
    workloads=serving(_serving),
    variants=variants(_engine_forms) + _many_rows(),
    peers=["vllm", "sglang", "tile_kernels"],
)
def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    sf_clamp_min: float | None = None,
    zero_padding: bool = True,
    round_activation: bool = False,
) -> Quantized:
    """Quantised silu(gate) * up, weighted by the router, with one scale for each group of columns.

    gate is the left half of x, up the right one; y = (gate / (1 + exp(-gate))) * up, then times the routing weight,
    in float32. The cast is that of ``per_token_cast``.

    Args:
        x: bfloat16 or float32 [N, 2 H], contiguous, H a multiple of 128.
        fmt: ``e4m3``.
        num_per_channels: columns of a group: 32, 64, 128 or H.
        pos_to_token_topk: int32 [N], index into the flat ``topk_weights``; out of range gives a row of zeros.
        topk_weights: float32 [T, K]; comes with ``pos_to_token_topk``.
        pos_to_expert: int32 [N]; negative for padding rows, whose data and scales are 0.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes; not with num_per_channels = H.
        round_sf: scales are powers of two.
        use_packed_ue8m0: four exponents in an int32; needs both flags above.
        swiglu_clamp_value: gate at most c, up in [-c, c].
        clamped_count: int64 [3]; the numbers of gate values above c, up values above c, up values below -c are added,
            of rows that are not padding. Needs ``swiglu_clamp_value``.
        sf_clamp_min: smallest amax, in place of 1e-4.
        zero_padding: False leaves the data of padding rows as they are; their scales are 0 all the same.
        round_activation: silu(gate) and its product with up are rounded to bfloat16, as by vLLM; needs bfloat16 x.

    Returns:
        (data, sf): float8_e4m3fn [N, H]; float32 [N, ceil(H / npc)] or int32 [N, ceil(H / npc / 4)].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, group size or combination of arguments.
    """
    rows = _rows(pos_to_token_topk, topk_weights, pos_to_expert, swiglu_clamp_value, clamped_count)
    y, live = gating.activate(x, rows, round_activation)
    amax = casting.amax_of(y, None, 1, num_per_channels)
    sf, inverse = scales.rule(amax, FORMATS[fmt], round_sf, floor=sf_clamp_min)
    sf = torch.where(live[:, None], sf, 0.0)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return casting.quantize(y, None, inverse, fmt, 1, num_per_channels), scales.lay_out(sf, layout)
