"""The scales of a per-token cast alone."""

import dataclasses
from typing import Any

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Existing, Plan, Quantized, early_below, operator
from tk_serving.quant import casting, samples, scales
from tk_serving.quant.formats import FORMATS
from tk_serving.workloads import serving

_expect = Expect("per_token_cast_with_sf_only")

RESIDENT_BLOCKS = 2048
"""About so many blocks of a cast are on an H200 at once (16 on each of its 132 multiprocessors). With more, scales
alone take longer with an early launch; casts with data do not."""


def _plan(
    x: Tensor | Quantized,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    stochastic_cast: bool,
    out_sf: Tensor | None,
) -> Plan:
    _expect.one_of("fmt", fmt, ("e4m3", "e2m1"))
    source = casting.check_input(_expect, x, x_block_size, fmt)
    casting.check_channels(_expect, num_per_channels, source.hidden)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    sf = scales.sf_out(layout, source.tokens, -(-source.hidden // num_per_channels))
    if out_sf is not None:
        casting.check_given(_expect, "out_sf", out_sf, sf)
        _expect.same_device(x=source.data, out_sf=out_sf)
    launch = casting.cast_launch(source, fmt, num_per_channels, layout, round_sf, sf_only=True, given=(out_sf,))
    if num_per_channels in casting.GROUPS and not early_below(casting.blocks(source), RESIDENT_BLOCKS + 1):
        launch = dataclasses.replace(launch, pdl=False)
    return Plan((sf if out_sf is None else Existing("out_sf"),), (launch,) if source.tokens else ())


def _finish(result: Tensor, *args: Any) -> Tensor:
    return result if args[-1] is None else args[-1]


@operator(
    spec="operators.md P2, A7",
    phase="inference",
    plan=_plan,
    inputs=samples.per_token,
    equality=BITWISE,
    mutates=("out_sf",),
    finish=_finish,
    cases=[
        {"tokens": 0, "hidden": 512, "fmt": "e4m3", "npc": 128, "column_major": True},
        {"tokens": 5, "hidden": 592, "fmt": "e4m3", "npc": 128, "column_major": True, "values": "special"},
        {"tokens": 5, "hidden": 576, "fmt": "e2m1", "npc": 576, "values": "special"},
    ],
    workloads=serving(samples.activations),
    peers=["tile_kernels"],
)
def per_token_cast_with_sf_only(
    x: Tensor | Quantized,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    """The scales that ``per_token_cast`` would give, bit for bit, without the data.

    Args:
        x: bfloat16 or float32 [T, H], row-strided, H a multiple of 16; or a pair of e4m3 or e2m1 data and their scales.
        fmt: ``e4m3`` or ``e2m1``.
        num_per_channels: columns of a group: 16, 32, 64, 128 or H.
        x_block_size: (rows, columns) of a block of the scales of x; exactly if x is a pair.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes.
        round_sf: scales are powers of two.
        use_packed_ue8m0: four exponents in an int32; needs both flags above.
        use_e4m3_sf: scales in float8_e4m3fn; excludes rounding and packing.
        stochastic_cast: accepted; the scales do not depend on it.
        out_sf: preallocated result of the shape, dtype and strides that would be allocated.

    Returns:
        float32 [T, ceil(H / npc)], int32 [T, ceil(H / npc / 4)] or float8_e4m3fn [T, ceil(H / npc)].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, group size or combination of flags.
    """
    values, factor = casting.values_of(x, x_block_size)
    amax = casting.amax_of(values, factor, 1, num_per_channels)
    sf, _ = scales.rule(amax, FORMATS[fmt], round_sf, use_e4m3_sf)
    return scales.lay_out(
        sf, scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    )
