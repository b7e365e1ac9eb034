"""Cast with one scale for each group of columns of a token."""

from typing import Any

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Existing, Plan, Quantized, operator
from tk_serving.quant import casting, rand, samples, scales
from tk_serving.quant.formats import FORMATS
from tk_serving.workloads import Model, serving, variants

_expect = Expect("per_token_cast")
_PACKED = {"column_major": True, "round_sf": True, "packed": True}


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
    seed: int | None,
    out: Quantized | None,
) -> Plan:
    _expect.one_of("fmt", fmt, tuple(FORMATS))
    source = casting.check_input(_expect, x, x_block_size, fmt)
    casting.check_channels(_expect, num_per_channels, source.hidden)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    if fmt == "e5m6":
        _expect.that(source.sf is None, "x", "plain values with fmt 'e5m6'", "a (data, sf) pair")
        _expect.that(num_per_channels == source.hidden, "num_per_channels", f"H = {source.hidden}", num_per_channels)
        _expect.that(not use_e4m3_sf, "use_e4m3_sf", "False with fmt 'e5m6'", True)
    data = casting.data_out(fmt, source.tokens, source.hidden)
    sf = scales.sf_out(layout, source.tokens, -(-source.hidden // num_per_channels))
    if out is not None:
        casting.check_given(_expect, "out[0]", out[0], data)
        casting.check_given(_expect, "out[1]", out[1], sf)
        _expect.same_device(**{"x": source.data, "out[0]": out[0], "out[1]": out[1]})
    launch = casting.cast_launch(
        source, fmt, num_per_channels, layout, round_sf, given=out or (), stochastic=stochastic_cast, seed=seed
    )
    results = (data, sf) if out is None else (Existing("out", 0), Existing("out", 1))
    return Plan(results, (launch,) if source.tokens else ())


def _finish(results: Quantized, *args: Any) -> Quantized:
    return results if args[-1] is None else args[-1]


def _engine_forms(model: Model) -> list[dict[str, object]]:
    """On Hopper: powers of two for V4's linear layers; rows of scales for Triton experts of V3, and of V4 in SGLang."""
    if model.quant_group == 32:
        return []
    v4 = model.hc_mult > 0
    forms = [{**samples.activations(model), "column_major": v4, "round_sf": v4}]
    return [*forms, {**forms[0], "column_major": False}] if v4 else forms


@operator(
    spec="operators.md P1, A7",
    phase="inference",
    plan=_plan,
    inputs=samples.per_token,
    equality=BITWISE,
    mutates=("out",),
    finish=_finish,
    moves_data=True,
    cases=[
        {"tokens": 0, "hidden": 512, "fmt": "e2m1", "npc": 32},
        {"tokens": 5, "hidden": 576, "fmt": "e4m3", "npc": 128, "values": "special"},
        {"tokens": 7, "hidden": 512, "fmt": "e4m3", "npc": 128, "column_major": True, "pad": 8, "values": "special"},
        {"tokens": 130, "hidden": 144, "fmt": "e4m3", "npc": 64, "column_major": True, "values": "special"},
        {"tokens": 6, "hidden": 1040, "fmt": "e4m3", "npc": 128, **_PACKED},
        {"tokens": 131, "hidden": 96, "fmt": "e4m3", "npc": 32, **_PACKED},
        {
            "tokens": 4,
            "hidden": 592,
            "fmt": "e2m1",
            "npc": 16,
            "e4m3_sf": True,
            "source": "float32",
            "values": "special",
        },
        {"tokens": 3, "hidden": 1296, "fmt": "e4m3", "npc": 1296, "values": "special", **_PACKED},
        {"tokens": 5, "hidden": 520, "fmt": "e5m6", "npc": 520, "values": "special"},
        {
            "tokens": 5,
            "hidden": 544,
            "fmt": "e4m3",
            "npc": 128,
            "source": "e2m1",
            "block": (1, 32),
            "x_layout": "packed",
        },
        {
            "tokens": 5,
            "hidden": 400,
            "fmt": "e2m1",
            "npc": 32,
            "source": "e4m3",
            "block": (3, 128),
            "values": "special",
        },
        {"tokens": 5, "hidden": 592, "fmt": "e4m3", "npc": 128, "values": "special", "stochastic": True},
        {
            "tokens": 5,
            "hidden": 592,
            "fmt": "e2m1",
            "npc": 32,
            "round_sf": True,
            "values": "special",
            "stochastic": True,
        },
        {"tokens": 5, "hidden": 520, "fmt": "e5m6", "npc": 520, "values": "special", "stochastic": True},
    ],
    workloads=serving(samples.activations),
    variants=variants(_engine_forms),
    peers=["vllm", "sglang", "deepgemm", "tile_kernels"],
)
def per_token_cast(
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
    seed: int | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise rows to FP8, FP4 or E5M6 with one scale for each group of columns.

    The scale of a group is amax / MAX, with amax at least the floor of the format; the data are x * (MAX / amax),
    rounded to nearest even. ``value = data * sf``.

    Args:
        x: bfloat16 or float32 [T, H], row-strided, H a multiple of 16 (e5m6: of 8); or a pair of e4m3 or e2m1 data and
            their scales in any layout, which is requantised.
        fmt: ``e4m3``, ``e2m1`` (two values in an int8) or ``e5m6`` (eight values in twelve uint8; one scale per row).
        num_per_channels: columns of a group: 16, 32, 64, 128 or H. The last group may be short.
        x_block_size: (rows, columns) of a block of the scales of x; exactly if x is a pair.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes.
        round_sf: scales are powers of two.
        use_packed_ue8m0: four exponents in an int32; needs both flags above.
        use_e4m3_sf: scales in float8_e4m3fn; excludes rounding and packing.
        stochastic_cast: round up with a probability equal to the fraction, so that the mean of many casts is the value.
        seed: of the random bits of this call alone; see ``quant.rand.set_seed``.
        out: preallocated (data, sf) of the shape, dtype and strides that would be allocated.

    Returns:
        (data, sf): float8_e4m3fn [T, H], int8 [T, H / 2] or uint8 [T, 3 H / 2]; float32 [T, ceil(H / npc)], int32
        [T, ceil(H / npc / 4)] or float8_e4m3fn [T, ceil(H / npc)].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, group size or combination of flags.
    """
    values, factor = casting.values_of(x, x_block_size)
    amax = casting.amax_of(values, factor, 1, num_per_channels)
    sf, inverse = scales.rule(amax, FORMATS[fmt], round_sf, use_e4m3_sf)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    state = rand.next_state(values.device, seed) if stochastic_cast else None
    return casting.quantize(values, factor, inverse, fmt, 1, num_per_channels, state), scales.lay_out(sf, layout)
