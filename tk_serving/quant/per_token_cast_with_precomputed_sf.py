"""Per-token cast with given scales."""

from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Existing, Plan, Quantized, operator
from tk_serving.quant import casting, rand, samples, scales
from tk_serving.workloads import Maker, serving

_expect = Expect("per_token_cast_with_precomputed_sf")


def _plan(
    x: Tensor | Quantized,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    x_block_size: tuple[int, int] | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    stochastic_cast: bool,
    seed: int | None,
    out: Tensor | None,
) -> Plan:
    _expect.one_of("fmt", fmt, ("e4m3", "e2m1"))
    source = casting.check_input(_expect, x, x_block_size, fmt)
    casting.check_channels(_expect, num_per_channels, source.hidden)
    if use_packed_ue8m0:
        _expect.dtype("sf", sf, torch.int32)
    if use_e4m3_sf:
        _expect.dtype("sf", sf, torch.float8_e4m3fn)
    scales.check_sf(_expect, "sf", sf, source.tokens, -(-source.hidden // num_per_channels))
    data = casting.data_out(fmt, source.tokens, source.hidden)
    if out is not None:
        casting.check_given(_expect, "out", out, data)
    _expect.same_device(x=source.data, sf=sf, out=out)
    launch = casting.rescale_launch(source, fmt, sf, (1, num_per_channels), out, stochastic=stochastic_cast, seed=seed)
    return Plan((data if out is None else Existing("out"),), (launch,) if source.tokens else ())


def _inputs(
    make: Maker, *, tokens: int, hidden: int, npc: int, layout: str, values: str = "normal", **given: Any
) -> tuple:
    x, fmt, _, block, *flags = samples.per_token(make, tokens=tokens, hidden=hidden, npc=npc, values=values, **given)
    sf = samples.scale_matrix(make, tokens, -(-hidden // npc), layout)
    if values == "special" and sf.dtype == torch.float32 and sf.numel():
        sf[0, 0] = 0
    return x, fmt, npc, sf, block, False, False, False, False, *flags[4:]


def _finish(result: Tensor, *args: Any) -> Tensor:
    return result if args[-1] is None else args[-1]


@operator(
    spec="operators.md P3, A7",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("out",),
    finish=_finish,
    cases=[
        {"tokens": 0, "hidden": 512, "fmt": "e4m3", "npc": 128, "layout": "row"},
        {"tokens": 5, "hidden": 592, "fmt": "e4m3", "npc": 128, "layout": "packed", "values": "special", "pad": 8},
        {"tokens": 5, "hidden": 576, "fmt": "e2m1", "npc": 576, "layout": "row", "values": "special"},
        {"tokens": 6, "hidden": 544, "fmt": "e4m3", "npc": 32, "layout": "column", "source": "e2m1", "block": (1, 32)},
        {
            "tokens": 5,
            "hidden": 592,
            "fmt": "e2m1",
            "npc": 128,
            "layout": "row",
            "values": "special",
            "stochastic": True,
        },
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size, "fmt": "e4m3", "npc": m.quant_group, "layout": "column"}),
    peers=["tile_kernels"],
)
def per_token_cast_with_precomputed_sf(
    x: Tensor | Quantized,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    seed: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Quantise rows to FP8 or FP4 with given scales: x * (1 / sf), rounded to nearest even and saturated.

    The codes of a group with scale 0 are 0.

    Args:
        x: bfloat16 or float32 [T, H], row-strided, H a multiple of 16; or a pair of e4m3 or e2m1 data and their scales.
        fmt: ``e4m3`` or ``e2m1``.
        num_per_channels: columns of a group: 16, 32, 64, 128 or H.
        sf: float32 [T, ceil(H / npc)], packed int32 [T, ceil(H / npc / 4)] or float8_e4m3fn [T, ceil(H / npc)], of any
            strides.
        x_block_size: (rows, columns) of a block of the scales of x; exactly if x is a pair.
        use_tma_aligned_col_major_sf, round_sf: accepted; the strides and values of ``sf`` decide.
        use_packed_ue8m0, use_e4m3_sf: if set, the dtype of ``sf`` must agree.
        stochastic_cast: round up with a probability equal to the fraction, so that the mean of many casts is the value.
        seed: of the random bits of this call alone; see ``quant.rand.set_seed``.
        out: preallocated result.

    Returns:
        float8_e4m3fn [T, H] or int8 [T, H / 2].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout or group size.
    """
    values, factor = casting.values_of(x, x_block_size)
    scale = scales.read(sf, -(-values.shape[1] // num_per_channels))
    inverse = torch.where(scale == 0, 0.0, torch.ones_like(scale) / scale)
    dead = scales.per_element(scale == 0, 1, num_per_channels, *values.shape)
    state = rand.next_state(values.device, seed) if stochastic_cast else None
    return casting.quantize(torch.where(dead, 0.0, values), factor, inverse, fmt, 1, num_per_channels, state)
