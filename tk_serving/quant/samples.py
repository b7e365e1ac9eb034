"""Inputs of casts for tests and benchmarks."""

import torch
from torch import Tensor

from tk_serving.operator import Quantized
from tk_serving.quant import scales
from tk_serving.quant.formats import FORMATS, encode
from tk_serving.workloads import Maker, Model

RARE = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-30, 448.0, -3.5, 3e38, 2.0**-140, -1e-4, 6.0)


def matrix(make: Maker, tokens: int, hidden: int, dtype: torch.dtype, values: str = "normal", pad: int = 0) -> Tensor:
    """[T, H] with a row stride of H + ``pad``; ``special`` has zeros, NaN, infinities, extremes and ties."""
    x = make.randn(tokens, hidden + pad, dtype=dtype)
    if values == "special" and x.device.type != "meta" and tokens:
        rare = torch.tensor(RARE, device=x.device).to(dtype)
        where = make.rand(tokens, hidden + pad)
        x[where < 0.02] = rare[make.randint(0, len(RARE), tokens, hidden + pad)][where < 0.02]
        x[0] = 0
        if tokens > 1:
            x[1, :128] = -0.0
            x[1, 128:] = 448.0 * 2.0**-3
        if tokens > 2:
            x[2] = torch.arange(hidden + pad, device=x.device) % 61 * 0.25  # ties in every format
    return x[:, :hidden]


def quantized(
    make: Maker,
    tokens: int,
    hidden: int,
    fmt: str,
    block: tuple[int, int],
    layout: str = scales.ROW,
    values: str = "normal",
    pad: int = 0,
) -> Quantized:
    """Random codes, row-strided by ``pad`` values, and scales of blocks in a layout."""
    width = FORMATS[fmt].columns(hidden)
    if values == "special":
        data = make.randint(0, 256, tokens, FORMATS[fmt].columns(hidden + pad), dtype=torch.uint8).view(
            FORMATS[fmt].dtype
        )
    else:
        data = make.value(encode(make.randn(tokens, hidden + pad, scale=FORMATS[fmt].maximum / 8), fmt))
    sf = scale_matrix(make, -(-tokens // block[0]), -(-hidden // block[1]), layout)
    return data[:, :width], sf


def scale_matrix(make: Maker, rows: int, blocks: int, layout: str) -> Tensor:
    """Random scales in a layout."""
    sf = torch.exp2(make.randint(-6, 4, rows, blocks, dtype=torch.float32))
    if layout != scales.PACKED:
        sf = sf * (1 + make.rand(rows, blocks))
    return scales.lay_out(sf, layout)


def cast_input(
    make: Maker,
    tokens: int,
    hidden: int,
    kind: str,
    block: tuple[int, int] | None = None,
    layout: str = scales.ROW,
    values: str = "normal",
    pad: int = 0,
) -> Tensor | Quantized:
    """The input of a cast: ``bfloat16``, ``float32``, or a quantised format with blocks of scales."""
    if block is None:
        return matrix(make, tokens, hidden, getattr(torch, kind), values, pad)
    return quantized(make, tokens, hidden, kind, block, layout, values, pad)


def per_token(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    fmt: str,
    npc: int,
    source: str = "bfloat16",
    block: tuple[int, int] | None = None,
    x_layout: str = scales.ROW,
    values: str = "normal",
    pad: int = 0,
    column_major: bool = False,
    round_sf: bool = False,
    packed: bool = False,
    e4m3_sf: bool = False,
    stochastic: bool = False,
) -> tuple:
    """Arguments of ``per_token_cast``."""
    x = cast_input(make, tokens, hidden, source, block, x_layout, values, pad)
    rounding = (True, 7) if stochastic else ()
    return x, fmt, npc, block, column_major, round_sf, packed, e4m3_sf, *rounding


def activations(model: Model) -> dict[str, object]:
    """Column-major scales for 128 channels (what DeepGEMM reads on Hopper), packed ones for MXFP8."""
    mxfp8 = model.quant_group == 32
    scaling = {"column_major": True, "round_sf": mxfp8, "packed": mxfp8}
    return {"hidden": model.hidden_size, "fmt": "e4m3", "npc": model.quant_group, **scaling}
