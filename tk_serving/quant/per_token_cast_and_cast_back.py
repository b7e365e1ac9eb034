"""Rounding of rows to the values that a per-token cast can represent, in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Launch, Plan, operator
from tk_serving.quant import casting, samples, scales
from tk_serving.quant.formats import FORMATS, decode
from tk_serving.workloads import Maker, serving

_expect = Expect("per_token_cast_and_cast_back")


def _plan(x: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool) -> Plan:
    _expect.one_of("fmt", fmt, ("e4m3", "e2m1"))
    source = casting.check_input(_expect, x, None, fmt)
    _expect.one_of("num_per_channels", num_per_channels, casting.GROUPS)
    _expect.multiple("x", source.hidden, num_per_channels, "H")
    layout = scales.layout_of(_expect, False, round_sf, False, use_e4m3_sf)
    config: dict[str, Any] = {"x": source.config["x"], "fmt": fmt, "npc": num_per_channels, "layout": layout}
    config |= {"round_sf": round_sf, "aligned": casting.aligned(x)}
    launch = Launch("quant.per_token_cast_and_cast_back", config, lambda _, x, *rest: (x,))
    return Plan((), (launch,) if source.tokens else ())


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    fmt: str,
    npc: int,
    source: str = "bfloat16",
    values: str = "normal",
    pad: int = 0,
    round_sf: bool = False,
    e4m3_sf: bool = False,
) -> tuple:
    return samples.cast_input(make, tokens, hidden, source, values=values, pad=pad), fmt, npc, round_sf, e4m3_sf


@operator(
    spec="operators.md A6",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("x",),
    cases=[
        {"tokens": 0, "hidden": 128, "fmt": "e2m1", "npc": 32},
        {"tokens": 5, "hidden": 640, "fmt": "e4m3", "npc": 128, "pad": 8, "values": "special"},
        {"tokens": 131, "hidden": 96, "fmt": "e2m1", "npc": 32, "round_sf": True, "values": "special"},
        {
            "tokens": 5,
            "hidden": 592,
            "fmt": "e2m1",
            "npc": 16,
            "source": "float32",
            "e4m3_sf": True,
            "values": "special",
        },
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size, "fmt": "e2m1", "npc": 32, "round_sf": True}),
    peers=["tile_kernels"],
    traffic=lambda x, *_: 2 * x.numel() * x.element_size(),
)
def per_token_cast_and_cast_back(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> None:
    """x becomes ``per_token_cast_back(per_token_cast(x))``, bit for bit, in one pass.

    Args:
        x: bfloat16 or float32 [T, H], row-strided; changed in place.
        fmt: ``e4m3`` or ``e2m1``.
        num_per_channels: columns of a group: 16, 32, 64 or 128, dividing H.
        round_sf: scales are powers of two.
        use_e4m3_sf: scales in float8_e4m3fn; excludes rounding.

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, group size or combination of flags.
    """
    values = x.float()
    amax = casting.amax_of(values, None, 1, num_per_channels)
    sf, inverse = scales.rule(amax, FORMATS[fmt], round_sf, use_e4m3_sf)
    codes = decode(casting.quantize(values, None, inverse, fmt, 1, num_per_channels), fmt)
    x.copy_(codes * scales.per_element(sf.float(), 1, num_per_channels, *x.shape))
