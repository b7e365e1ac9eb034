"""What the casts with one scale for each column of a block of rows share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving.expect import Expect, short
from tk_serving.layout import aligned
from tk_serving.operator import Quantized
from tk_serving.plan import Launch, Out, Plan
from tk_serving.quant import casting, scales
from tk_serving.quant.formats import FORMATS

BLOCKS = (32, 128)
"""Rows of a block."""

GROUPS = (32, 128)
"""Columns that share a scale of the input."""


def check(
    expect: Expect,
    x: Tensor | Quantized,
    fmt: str,
    num_per_tokens: int,
    num_per_channels: int | None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
) -> tuple[int, int]:
    """Check the input; (T, columns)."""
    expect.one_of("fmt", fmt, ("e4m3",))
    expect.one_of("num_per_tokens", num_per_tokens, BLOCKS)
    if isinstance(x, Tensor):
        expect.that(num_per_channels is None, "num_per_channels", "None, as x has no scales", num_per_channels)
        tokens, width = expect.tensor("x", x, dtypes, ("T", "H"), contiguous=False)
        casting.check_hidden(expect, width, fmt)
        return tokens, width
    data, sf = x
    tokens, width = expect.tensor("x[0]", data, torch.float8_e4m3fn, ("T", "H"), contiguous=False)
    casting.check_hidden(expect, width, fmt)
    expect.one_of("num_per_channels", num_per_channels, GROUPS)
    assert num_per_channels is not None
    expect.dtype("x[1]", sf, torch.float32)
    expect.shape("x[1]", sf, (tokens, -(-width // num_per_channels)))
    expect.same_device(**{"x[0]": data, "x[1]": sf})
    return tokens, width


def plan(
    x: Tensor | Quantized,
    rows: int,
    hidden: int,
    num_per_tokens: int,
    round_sf: bool,
    *,
    num_per_channels: int | None = None,
    positions: Tensor | None = None,
    packed: bool = False,
    transposed: bool = False,
    swiglu: bool = False,
    clamp: float | None = None,
) -> Plan:
    """The plan of a cast to [rows, hidden]."""
    data = x if isinstance(x, Tensor) else x[0]
    blocks = -(-rows // num_per_tokens)
    config = {
        "x": short(x.dtype) if isinstance(x, Tensor) else "e4m3",
        "npc": num_per_channels or 0,
        "gathered": positions is not None,
        "swiglu": swiglu,
        "clamp": clamp is not None,
        "npt": num_per_tokens,
        "round_sf": round_sf,
        "packed": packed,
        "transposed": transposed,
        "aligned": aligned(data),
    }

    def arguments(outputs: Sequence[Tensor | None], x: Tensor | Quantized, *_: object) -> Sequence[Any]:
        values = (x, None) if isinstance(x, Tensor) else x
        return (*values, positions, *outputs, float(clamp or 0.0))

    outputs = (
        Out((hidden, rows) if transposed else (rows, hidden), FORMATS["e4m3"].dtype),
        Out((-(-blocks // 4), hidden), torch.int32) if packed else Out((blocks, hidden), torch.float32),
    )
    return Plan(outputs, (Launch("quant.per_channel_cast", config, arguments),) if rows else ())


# -- the reference --------------------------------------------------------------------------------------------


def values_of(x: Tensor | Quantized, num_per_channels: int | None) -> Tensor:
    """float32 values, dequantised."""
    codes, factor = casting.values_of(x, (1, num_per_channels or 1))
    return codes if factor is None else codes * factor


def cast(values: Tensor, num_per_tokens: int, round_sf: bool, packed: bool = False) -> Quantized:
    """(data, sf) of float32 values [T, H]."""
    amax = casting.amax_of(values, None, num_per_tokens, 1)
    sf, inverse = scales.rule(amax, FORMATS["e4m3"], round_sf)
    data = casting.quantize(values, None, inverse, "e4m3", num_per_tokens, 1)
    return data, pack(sf) if packed else sf


def pack(sf: Tensor) -> Tensor:
    """int32 [ceil(M / 4), H]: the exponents of four blocks of rows, the first in the low byte."""
    exponents = torch.nn.functional.pad(sf.view(torch.int32) >> 23, (0, 0, 0, -len(sf) % 4))
    return exponents.to(torch.uint8).view(-1, 4, sf.shape[1]).transpose(1, 2).contiguous().view(torch.int32)[..., 0]
