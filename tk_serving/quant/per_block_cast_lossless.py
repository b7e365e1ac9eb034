"""FP4 data as FP8 data with larger blocks, without a change of value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect, short
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Plan, Quantized, operator
from tk_serving.quant import casting, scales
from tk_serving.quant.formats import decode_e2m1, encode_e4m3
from tk_serving.workloads import MODELS, Maker, Workload

RAISE = 6  # the largest code, 6, times 2^6 is 384, below the maximum of e4m3
REACH = 14  # the smallest code, 0.5, is exact down to 2^-9 = 0.5 * 2^(RAISE - REACH)

_expect = Expect("per_block_cast_lossless")


def _plan(
    x: Quantized,
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
) -> Plan:
    _expect.one_of("fmt", fmt, ("e4m3",))
    data, sf = x
    _expect.dtype("x[0]", data, torch.int8)
    _expect.dtype("x[1]", sf, torch.float32, torch.int32)
    source = casting.check_input(_expect, x, x_block_size, "e2m1")
    _expect.multiple("x[0]", source.hidden, 32, "H")
    for name, (_, columns) in (("x_block_size", x_block_size), ("out_block_size", out_block_size)):
        ok = columns >= 8 and columns & (columns - 1) == 0
        _expect.that(ok, name, "columns that are a power of two, at least 8", columns)
    (block_m, block_k), (out_m, out_k) = x_block_size, out_block_size
    ok = out_m > 0 and out_m % block_m == 0 and out_k % block_k == 0
    _expect.that(ok, "out_block_size", f"multiples of {(block_m, block_k)}", (out_m, out_k))
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, True, use_packed_ue8m0)
    out = casting.data_out("e4m3", source.tokens, source.hidden)
    out_sf = scales.sf_out(layout, -(-source.tokens // out_m), -(-source.hidden // out_k))
    exponents = {"x_sf": short(sf.dtype), "ratio": (out_m // block_m, out_k // block_k), "layout": layout}
    values = {"x_sf": short(sf.dtype), "x_block": (block_m, block_k), "aligned": aligned(data)}
    values |= {"sf": short(out_sf.dtype), "sf_block": (out_m, out_k)}
    launches = (
        Launch("quant.per_block_cast_lossless:exponents", exponents, _scales),
        Launch("quant.per_block_cast_lossless:values", values, _values),
    )
    return Plan((out, out_sf), launches if source.tokens else ())


def _scales(outputs: Sequence[Tensor], x: Quantized, *_: object) -> tuple:
    return x[1], outputs[1]


def _values(outputs: Sequence[Tensor], x: Quantized, *_: object) -> tuple:
    return *x, outputs[1], outputs[0]


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    block: tuple[int, int],
    out_block: tuple[int, int],
    layout: str = scales.ROW,
    column_major: bool = False,
    packed: bool = False,
    spread: int = 14,
    lowest: int = 110,
    pad: int = 0,
) -> tuple:
    """Exponents from ``lowest`` to ``lowest + spread``."""
    data = make.randint(-128, 128, tokens, (hidden + pad) // 2, dtype=torch.int8)[:, : hidden // 2]
    rows, blocks = -(-tokens // block[0]), -(-hidden // block[1])
    exponents = make.randint(lowest, lowest + spread + 1, rows, blocks, dtype=torch.int32)
    if layout == scales.PACKED:
        sf = scales.sf_out(layout, rows, blocks).zeros(make.device).copy_(scales.pack(exponents))
    else:
        sf = scales.lay_out((exponents << 23).view(torch.float32), layout)
    return (data, sf), "e4m3", block, out_block, column_major, False, packed


def _verify(x: Quantized, fmt: str, x_block_size: Sequence[int], out_block_size: Sequence[int], *_: object) -> None:
    data, sf = x
    if not data.numel():
        return
    if sf.dtype == torch.float32:
        _expect.that(scales.powers_of_two(sf), "x[1]", "positive powers of two", "other values")
    codes = decode_e2m1(data)
    e_in, e_out = _exponents(sf, data.shape[1] * 2, x_block_size, out_block_size)
    below = scales.per_element(e_in, *x_block_size, *codes.shape) - scales.per_element(
        e_out, *out_block_size, *codes.shape
    )
    lossy = (codes != 0) & (below < RAISE - REACH)
    _expect.that(not bool(lossy.any()), "x[1]", f"scales within 2^{REACH} of the largest in a block", "a wider range")


def _exponents(
    sf: Tensor, hidden: int, x_block_size: Sequence[int], out_block_size: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """int32 biased exponents of the scales of the input and of the output."""
    e_in = scales.exponents(sf, -(-hidden // x_block_size[1]))
    down, across = (large // small for large, small in zip(out_block_size, x_block_size, strict=True))
    most = scales.block_amax(e_in.float(), down, across).to(torch.int32)
    return e_in, (most - RAISE).clamp(min=0)


def _experts() -> list[Workload]:
    """FP4 weights of one expert and of eight, for FP8 matrix products with blocks of 128 x 128."""
    return [
        Workload(
            f"{m.name}-experts",
            {"hidden": m.hidden_size, "block": (1, 32), "out_block": (128, 128), "layout": scales.PACKED},
            (2 * m.moe_intermediate_size, 16 * m.moe_intermediate_size),
            m.key,
        )
        for m in MODELS
        if m.scoring_func == "sqrtsoftplus"
    ]


@operator(
    spec="operators.md P7",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    verify=_verify,
    cases=[
        {"tokens": 0, "hidden": 64, "block": (1, 32), "out_block": (1, 64)},
        {"tokens": 130, "hidden": 160, "block": (1, 32), "out_block": (128, 128), "spread": 24, "pad": 32},
        {
            "tokens": 70,
            "hidden": 608,
            "block": (1, 32),
            "out_block": (32, 32),
            "layout": "packed",
            "column_major": True,
            "packed": True,
            "lowest": 0,
        },
        {"tokens": 5, "hidden": 544, "block": (1, 16), "out_block": (3, 128), "layout": "column", "column_major": True},
        {"tokens": 37, "hidden": 544, "block": (2, 32), "out_block": (2, 32), "layout": "packed"},
    ],
    workloads=_experts(),
    peers=["tile_kernels"],
)
def per_block_cast_lossless(
    x: Quantized,
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> Quantized:
    """FP4 data with power-of-two scales as FP8 data with larger blocks: the same values, exactly.

    The scale of an output block is 2^-6 times its largest input scale, at least 2^-127. Exact where every block with a
    non-zero code has a scale within 2^14 of the largest of its output block; smaller ones are rounded to nearest even.

    Args:
        x: (data, sf). data: int8 e2m1 [T, H / 2], row-strided, H a multiple of 32. sf: positive powers of two, float32
            or packed int32, of any strides; sign and mantissa do not take part.
        fmt: ``e4m3``.
        x_block_size: (rows, columns) of a block of sf; columns a power of two, at least 8.
        out_block_size: of the result; multiples of ``x_block_size``, columns a power of two.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes.
        round_sf: accepted; the scales are powers of two anyway.
        use_packed_ue8m0: four exponents in an int32; needs column-major scales.

    Returns:
        (data, sf): float8_e4m3fn [T, H]; float32 [ceil(T / rows), ceil(H / columns)] or int32
        [ceil(T / rows), ceil(H / columns / 4)].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, block size or combination of flags.
    """
    data, sf = x
    codes = decode_e2m1(data)
    e_in, e_out = _exponents(sf, codes.shape[1], x_block_size, out_block_size)
    shift = scales.per_element(e_in, *x_block_size, *codes.shape) - scales.per_element(
        e_out, *out_block_size, *codes.shape
    )
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, True, use_packed_ue8m0)
    # ldexp in float64: a shift may lie outside of the exponents of float32.
    values = torch.ldexp(codes.double(), shift).float()
    return encode_e4m3(values), scales.lay_out(scales.of_exponents(e_out), layout)
