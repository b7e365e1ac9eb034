"""Cast with one scale for each block of rows and columns."""

from typing import Any

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Existing, Plan, Quantized, operator
from tk_serving.quant import block_casting, casting, scales
from tk_serving.quant.formats import FORMATS

_expect = Expect("per_block_cast")
_PACKED = {"column_major": True, "round_sf": True, "packed": True}


def _plan(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    out: Quantized | None,
) -> Plan:
    source, rows, blocks = block_casting.check(_expect, x, fmt, block_size)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    layout, sf = block_casting.scaled(flags, _expect, rows, blocks)
    data = casting.data_out(fmt, source.tokens, source.hidden)
    if out is not None:
        casting.check_given(_expect, "out[0]", out[0], data)
        casting.check_given(_expect, "out[1]", out[1], sf)
        _expect.same_device(**{"x": x, "out[0]": out[0], "out[1]": out[1]})
    launch = block_casting.launch(source, fmt, block_size, layout, round_sf, given=out[:1] if out else ())
    results = (data, sf) if out is None else (Existing("out", 0), Existing("out", 1))
    return Plan(results, (launch,) if source.tokens else ())


def _finish(results: Quantized, *args: Any) -> Quantized:
    return results if args[-1] is None else args[-1]


@operator(
    spec="operators.md P4, A7",
    phase="both",
    plan=_plan,
    inputs=block_casting.inputs,
    equality=BITWISE,
    mutates=("out",),
    finish=_finish,
    moves_data=True,
    cases=[
        {"tokens": 0, "hidden": 256, "block": (128, 128), "column_major": True},
        {"tokens": 130, "hidden": 208, "block": (128, 128), "values": "special"},
        {"tokens": 150, "hidden": 656, "block": (128, 128), "source": "float32", **_PACKED},
        {"tokens": 70, "hidden": 304, "block": (32, 32), "values": "special", **_PACKED},
        {"tokens": 33, "hidden": 176, "block": (32, 128), "column_major": True, "values": "special"},
        {"tokens": 35, "hidden": 176, "block": (128, 32), "fmt": "e2m1", "column_major": True, "values": "special"},
        {"tokens": 32, "hidden": 144, "block": (32, 32), "fmt": "e2m1", "source": "float32", "values": "special"},
    ],
    workloads=block_casting.weights(),
    peers=["tile_kernels"],
)
def per_block_cast(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise a matrix to FP8 or FP4 with one scale for each block of rows and columns.

    The scale of a block is amax / MAX, with amax at least the floor of the format; the data are x * (MAX / amax),
    rounded to nearest even. Blocks cut by an edge use the elements that exist.

    Args:
        x: bfloat16 or float32 [T, H], contiguous, H a multiple of 16.
        fmt: ``e4m3`` or ``e2m1`` (two values in an int8).
        block_size: (rows, columns) of a block, each 32 or 128.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes.
        round_sf: scales are powers of two.
        use_packed_ue8m0: four exponents in an int32; needs both flags above.
        out: preallocated (data, sf) of the shape, dtype and strides that would be allocated.

    Returns:
        (data, sf): float8_e4m3fn [T, H] or int8 [T, H / 2]; float32 [ceil(T / rows), ceil(H / columns)] or int32
        [ceil(T / rows), ceil(H / columns / 4)].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, block size or combination of flags.
    """
    values, amax = x.float(), casting.amax_of(x.float(), None, *block_size)
    sf, inverse = scales.rule(amax, FORMATS[fmt], round_sf)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return casting.quantize(values, None, inverse, fmt, *block_size), scales.lay_out(sf, layout)
