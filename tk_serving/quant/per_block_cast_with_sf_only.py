"""The scales of a per-block cast alone."""

from typing import Any

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Existing, Plan, operator
from tk_serving.quant import block_casting, casting, scales
from tk_serving.quant.formats import FORMATS

_expect = Expect("per_block_cast_with_sf_only")


def _plan(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    out: Tensor | None,
) -> Plan:
    source, rows, blocks = block_casting.check(_expect, x, fmt, block_size)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    layout, sf = block_casting.scaled(flags, _expect, rows, blocks)
    if out is not None:
        casting.check_given(_expect, "out", out, sf)
        _expect.same_device(x=x, out=out)
    launch = block_casting.launch(source, fmt, block_size, layout, round_sf, sf_only=True)
    return Plan((sf if out is None else Existing("out"),), (launch,) if source.tokens else ())


def _finish(result: Tensor, *args: Any) -> Tensor:
    return result if args[-1] is None else args[-1]


@operator(
    spec="operators.md P5, A7",
    phase="both",
    plan=_plan,
    inputs=block_casting.inputs,
    equality=BITWISE,
    mutates=("out",),
    finish=_finish,
    cases=[
        {"tokens": 130, "hidden": 272, "block": (128, 128), "values": "special"},
        {
            "tokens": 40,
            "hidden": 144,
            "block": (32, 32),
            "fmt": "e2m1",
            "column_major": True,
            "round_sf": True,
            "packed": True,
            "values": "special",
        },
    ],
    workloads=block_casting.weights(),
    peers=["tile_kernels"],
)
def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The scales that ``per_block_cast`` would give, bit for bit, without the data.

    Args:
        x: bfloat16 or float32 [T, H], contiguous, H a multiple of 16.
        fmt: ``e4m3`` or ``e2m1``.
        block_size: (rows, columns) of a block, each 32 or 128.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes.
        round_sf: scales are powers of two.
        use_packed_ue8m0: four exponents in an int32; needs both flags above.
        out: preallocated result of the shape, dtype and strides that would be allocated.

    Returns:
        float32 [ceil(T / rows), ceil(H / columns)] or int32 [ceil(T / rows), ceil(H / columns / 4)].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, block size or combination of flags.
    """
    sf, _ = scales.rule(casting.amax_of(x.float(), None, *block_size), FORMATS[fmt], round_sf)
    return scales.lay_out(sf, scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0))
