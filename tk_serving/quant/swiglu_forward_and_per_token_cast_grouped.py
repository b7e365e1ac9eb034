"""SwiGLU, quantised, of rows that are grouped by expert."""

from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE, Steps
from tk_serving.expect import Expect
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.quant import casting, gating, scales
from tk_serving.quant.formats import FORMATS
from tk_serving.quant.swiglu_backward import NAMES
from tk_serving.workloads import Maker, Model, serving

GROUPS = (32, 128)

_expect = Expect("swiglu_forward_and_per_token_cast_grouped")


def _plan(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    routed_scaling_factor: float | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_value: float | None,
    clamped_count: Tensor | None,
) -> Plan:
    _expect.one_of("fmt", fmt, ("e4m3",))
    _expect.one_of("num_per_channels", num_per_channels, GROUPS)
    rows = _rows(psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value, clamped_count)
    n, hidden = rows.check(_expect, x, num_per_channels, NAMES)
    rows.check_counts(_expect, 4, "clamp_value")
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    launch = gating.launch(x, rows, _rows_of, fmt, num_per_channels, layout, round_sf, FORMATS[fmt].floor, lean=True)
    results = casting.data_out(fmt, n, hidden), scales.sf_out(layout, n, hidden // num_per_channels)
    return Plan(results, (launch,) if n else ())


def _rows(
    psum: Tensor | None, weights: Tensor | None, factor: float | None, clamp: float | None, counts: Tensor | None
) -> gating.Rows:
    return gating.Rows(psum=psum, row_weights=weights, factor=factor, clamp=clamp, counts=counts)


def _rows_of(x: Tensor, fmt: str, npc: int, *arguments: Any) -> gating.Rows:
    return _rows(*arguments[:3], *arguments[6:])


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    npc: int,
    psum: tuple[int, ...] = (),
    weighted: bool = True,
    factor: float | None = None,
    column_major: bool = False,
    round_sf: bool = False,
    packed: bool = False,
    clamp: float | None = None,
    counted: bool = False,
) -> tuple:
    x = make.randn(tokens, 2 * hidden, dtype=torch.bfloat16, scale=2.0)
    intervals = make.value(torch.tensor(psum, dtype=torch.int32)) if psum else None
    counts = make.value(torch.tensor([5, 0, 2**40, 1])) if counted else None
    weights = make.rand(tokens) if weighted else None
    return x, "e4m3", npc, intervals, weights, factor, column_major, round_sf, packed, clamp, counts


def _serving(model: Model) -> dict[str, object]:
    mxfp8 = model.quant_group == 32
    return {
        "hidden": model.moe_intermediate_size,
        "npc": model.quant_group,
        "column_major": True,
        "round_sf": mxfp8,
        "packed": mxfp8,
        "clamp": model.swiglu_limit,
    }


@operator(
    spec="operators.md A10",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=(Steps(), Steps(), BITWISE),
    mutates=("clamped_count",),
    cases=[
        {"tokens": 0, "hidden": 256, "npc": 128, "column_major": True},
        {
            "tokens": 131,
            "hidden": 160,
            "npc": 32,
            "psum": (2, 130),
            "factor": 1.5,
            "column_major": True,
            "round_sf": True,
            "packed": True,
            "clamp": 0.5,
            "counted": True,
        },
        {"tokens": 7, "hidden": 544, "npc": 32, "column_major": True, "round_sf": True, "packed": True, "clamp": 1.0},
    ],
    workloads=serving(_serving),
    peers=["tile_kernels"],
)
def swiglu_forward_and_per_token_cast_grouped(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
) -> Quantized:
    """``swiglu_forward`` quantised with one scale for each group of columns.

    Args:
        x: bfloat16 or float32 [N, 2 H], contiguous; gate is the left half.
        fmt: ``e4m3``.
        num_per_channels: columns of a group: 32 or 128, a divisor of H.
        psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value, clamped_count: as in
            ``swiglu_forward``.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes.
        round_sf: scales are powers of two.
        use_packed_ue8m0: four exponents in an int32; needs both flags above.

    Returns:
        (data, sf): float8_e4m3fn [N, H]; float32 [N, H / npc] or int32 [N, ceil(H / npc / 4)]. Padding rows are 0 in
        both.

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, group size or combination of arguments.
    """
    rows = _rows(psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value, clamped_count)
    y, live = gating.activate(x, rows)
    sf, inverse = scales.rule(casting.amax_of(y, None, 1, num_per_channels), FORMATS[fmt], round_sf)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    data = casting.quantize(y, None, inverse, fmt, 1, num_per_channels)
    return data, scales.lay_out(torch.where(live[:, None], sf, 0.0), layout)
