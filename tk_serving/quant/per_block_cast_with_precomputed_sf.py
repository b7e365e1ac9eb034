"""Per-block cast with given scales."""

from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Existing, Plan, operator
from tk_serving.quant import block_casting, casting, samples, scales
from tk_serving.workloads import Maker

_expect = Expect("per_block_cast_with_precomputed_sf")


def _plan(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    out: Tensor | None,
) -> Plan:
    source, rows, blocks = block_casting.check(_expect, x, fmt, block_size)
    if use_packed_ue8m0:
        _expect.dtype("sf", sf, torch.int32)
    scales.check_sf(_expect, "sf", sf, rows, blocks)
    data = casting.data_out(fmt, source.tokens, source.hidden)
    if out is not None:
        casting.check_given(_expect, "out", out, data)
    _expect.same_device(x=x, sf=sf, out=out)
    launch = casting.rescale_launch(source, fmt, sf, (block_size[0], block_size[1]), out)
    return Plan((data if out is None else Existing("out"),), (launch,) if source.tokens else ())


def _inputs(
    make: Maker,
    *,
    tokens: int,
    block: tuple[int, int],
    hidden: int,
    layout: str,
    values: str = "normal",
    **given: Any,
) -> tuple:
    x, fmt, *_ = block_casting.inputs(make, tokens=tokens, block=block, hidden=hidden, values=values, **given)
    sf = samples.scale_matrix(make, -(-tokens // block[0]), -(-hidden // block[1]), layout)
    if values == "special" and sf.dtype == torch.float32 and sf.numel():
        sf[0, 0] = 0
    return x, fmt, block, sf


def _finish(result: Tensor, *args: Any) -> Tensor:
    return result if args[-1] is None else args[-1]


@operator(
    spec="operators.md P6, A7",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("out",),
    finish=_finish,
    cases=[
        {"tokens": 0, "hidden": 256, "block": (128, 128), "layout": "row"},
        {"tokens": 130, "hidden": 272, "block": (128, 128), "layout": "row", "values": "special"},
        {"tokens": 40, "hidden": 304, "block": (32, 32), "layout": "packed", "fmt": "e2m1", "source": "float32"},
    ],
    workloads=block_casting.weights(layout="row"),
    peers=["tile_kernels"],
)
def per_block_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Quantise a matrix to FP8 or FP4 with given scales: x * (1 / sf), rounded to nearest even and saturated.

    The codes of a block with scale 0 are 0.

    Args:
        x: bfloat16 or float32 [T, H], contiguous, H a multiple of 16.
        fmt: ``e4m3`` or ``e2m1``.
        block_size: (rows, columns) of a block, each 32 or 128.
        sf: float32 or float8_e4m3fn [ceil(T / rows), ceil(H / columns)] or packed int32 [ceil(T / rows),
            ceil(H / columns / 4)], of any strides.
        use_tma_aligned_col_major_sf, round_sf: accepted; the strides and values of ``sf`` decide.
        use_packed_ue8m0: if set, ``sf`` must be int32.
        out: preallocated result.

    Returns:
        float8_e4m3fn [T, H] or int8 [T, H / 2].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout or block size.
    """
    values = x.float()
    scale = scales.read(sf, -(-values.shape[1] // block_size[1]))
    inverse = torch.where(scale == 0, 0.0, torch.ones_like(scale) / scale)
    dead = scales.per_element(scale == 0, *block_size, *values.shape)
    return casting.quantize(torch.where(dead, 0.0, values), None, inverse, fmt, *block_size)
