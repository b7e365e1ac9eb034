"""Inputs of casts for tests and benchmarks."""

import torch
from torch import Tensor

from tk_serving.operator import Quantized
from tk_serving.quant import scales
from tk_serving.quant.formats import FORMATS, encode
from tk_serving.workloads import Maker

RARE = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-30, 448.0, -3.5, 3e38, 2.0**-140, -1e-4, 6.0)


def matrix(make: Maker, tokens: int, hidden: int, dtype: torch.dtype, values: str = "normal", pad: int = 0) -> Tensor:
    """[T, H] with a row stride of H + ``pad``; ``special`` has zero rows and blocks, NaN, infinities, extremes, ties."""
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
        data = make.randint(0, 256, tokens, FORMATS[fmt].columns(hidden + pad), dtype=torch.uint8).view(FORMATS[fmt].dtype)
    else:
        data = make.value(encode(make.randn(tokens, hidden + pad, scale=FORMATS[fmt].maximum / 8), fmt))
    rows, blocks = -(-tokens // block[0]), -(-hidden // block[1])
    exponents = make.randint(-6, 4, rows, blocks, dtype=torch.float32)
    sf = torch.exp2(exponents)
    if layout not in (scales.PACKED, scales.E4M3, scales.E4M3_COLUMN):
        sf = sf * (1 + make.rand(rows, blocks))
    if layout in (scales.E4M3, scales.E4M3_COLUMN):
        sf = sf.to(torch.float8_e4m3fn)
    return data[:, :width], scales.lay_out(sf, layout)


def source(
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
