"""Rows quantised in groups of columns back to bfloat16 or float32."""

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.quant import casting, samples
from tk_serving.quant.cast_back import TARGETS, plan_cast_back
from tk_serving.workloads import Maker, serving

_expect = Expect("per_token_cast_back")


def _plan(x: Quantized, fmt: str, num_per_channels: int, x_special_fmt: str | None) -> Plan:
    _expect.at_least("num_per_channels", num_per_channels, 1)
    return plan_cast_back(_expect, x, fmt, (1, num_per_channels), x_special_fmt)


def _inputs(
    make: Maker, *, tokens: int, hidden: int, source: str, npc: int, layout: str = "row", fmt: str = "bf16"
) -> tuple:
    x = samples.quantized(make, tokens, hidden, source, (1, npc), layout)
    return x, fmt, npc, "e5m6" if source == "e5m6" else None


@operator(
    spec="operators.md P9, A7",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 5, "hidden": 576, "source": "e4m3", "npc": 128, "layout": "column"},
        {"tokens": 3, "hidden": 520, "source": "e5m6", "npc": 520, "fmt": "fp32"},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size, "source": "e4m3", "npc": m.quant_group, "layout": "column"}),
    peers=["deepgemm", "tile_kernels"],
)
def per_token_cast_back(x: Quantized, fmt: str, num_per_channels: int, x_special_fmt: str | None = None) -> Tensor:
    """``cast_back`` with blocks of (1, ``num_per_channels``).

    Args:
        x: (data, sf) as for ``cast_back``; sf float32 [T, ceil(H / npc)], packed or float8_e4m3fn.
        fmt: ``bf16`` or ``fp32``.
        num_per_channels: columns of a group, a multiple of 8, or H.
        x_special_fmt: ``e5m6`` if the data are.

    Returns:
        bfloat16 or float32 [T, H].

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout or format.
    """
    return casting.dequantised(x, (1, num_per_channels)).to(TARGETS[fmt])
