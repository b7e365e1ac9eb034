"""Quantised blocks back to bfloat16 or float32."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Out, Plan, Quantized, operator
from tk_serving.quant import casting, samples, scales
from tk_serving.workloads import Maker, Model, serving

TARGETS = {"bf16": torch.bfloat16, "fp32": torch.float32}

_expect = Expect("cast_back")


def plan_cast_back(
    expect: Expect, x: Quantized, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None
) -> Plan:
    """The plan of a cast-back, for an operator whose checks are named by ``expect``."""
    expect.one_of("fmt", fmt, tuple(TARGETS))
    if x_special_fmt is not None:
        expect.one_of("x_special_fmt", x_special_fmt, ("e5m6",))
    source = casting.check_input(expect, x, x_block_size, fmt, special=x_special_fmt is not None)
    launch = casting.rescale_launch(source, str(TARGETS[fmt]).removeprefix("torch."), None, (1, 0), None)
    return Plan((Out((source.tokens, source.hidden), TARGETS[fmt]),), (launch,) if source.tokens else ())


def _plan(x: Quantized, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None) -> Plan:
    return plan_cast_back(_expect, x, fmt, x_block_size, x_special_fmt)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    source: str,
    block: tuple[int, int],
    fmt: str = "bf16",
    layout: str = scales.ROW,
    values: str = "normal",
    pad: int = 0,
) -> tuple:
    x = samples.quantized(make, tokens, hidden, source, block, layout, values, pad)
    return x, fmt, block, "e5m6" if source == "e5m6" else None


def _serving(model: Model) -> dict[str, object]:
    return {"hidden": model.hidden_size, "source": "e4m3", "block": (1, model.quant_group), "layout": scales.COLUMN}


@operator(
    spec="operators.md P8, A7",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    moves_data=True,
    cases=[
        {"tokens": 0, "hidden": 512, "source": "e4m3", "block": (1, 128)},
        {"tokens": 5, "hidden": 576, "source": "e4m3", "block": (1, 128), "layout": "column", "values": "special"},
        {"tokens": 130, "hidden": 144, "source": "e4m3", "block": (128, 128), "pad": 16},
        {"tokens": 5, "hidden": 544, "source": "e2m1", "block": (1, 32), "layout": "packed", "fmt": "fp32"},
        {"tokens": 7, "hidden": 400, "source": "e4m3", "block": (3, 128), "fmt": "fp32"},
        {"tokens": 4, "hidden": 520, "source": "e5m6", "block": (1, 520), "values": "special"},
        {"tokens": 4, "hidden": 528, "source": "e2m1", "block": (1, 16), "layout": "e4m3_column", "values": "special"},
    ],
    workloads=serving(_serving),
    peers=["tile_kernels"],
)
def cast_back(x: Quantized, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None = None) -> Tensor:
    """Dequantise: code * sf in float32, rounded to the target.

    Args:
        x: (data, sf). data: float8_e4m3fn [T, H], int8 e2m1 [T, H / 2] (H a multiple of 16), or uint8 e5m6
            [T, 3 H / 2] (H a multiple of 8); row-strided. sf: one scale for each block, float32, packed int32 or
            float8_e4m3fn, of any strides.
        fmt: ``bf16`` or ``fp32``.
        x_block_size: (rows, columns) of a block; columns a multiple of 8, or at least H.
        x_special_fmt: ``e5m6`` if the data are.

    Returns:
        bfloat16 or float32 [T, H]; NaN codes give NaN.

    Raises:
        TypeError: wrong dtype, also of e5m6 data without ``x_special_fmt`` or the reverse.
        ValueError: wrong shape, layout, block or format.
    """
    return casting.dequantised(x, x_block_size).to(TARGETS[fmt])
