"""Stochastic rounding of float32 values to the numbers of a narrower type, in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tk_serving.quant.formats import FORMATS


@dataclass(frozen=True)
class Grid:
    """The finite numbers of a type, as seen from the bits of a float32.

    Attributes:
        cut: bits of the mantissa that the type does not have.
        normal: bits of the smallest normal number; 0 where the exponents are those of float32.
        step: distance of the numbers below that.
    """

    cut: int
    normal: int
    step: float


def grid(target: str) -> Grid:
    """``bfloat16`` or a quantised format."""
    if target == "bfloat16":
        return Grid(16, 0, 0.0)
    fmt = FORMATS[target]
    return Grid(23 - fmt.mantissa, (127 + int(math.log2(fmt.smallest))) << 23, fmt.smallest * 2.0**-fmt.mantissa)


def stochastic(values: Tensor, random: Tensor, target: str) -> Tensor:
    """float32: one of the two neighbours of each value, the larger magnitude with a probability equal to the fraction.

    Args:
        values: float32.
        random: numbers below 2^32 of the shape of ``values``.
        target: ``bfloat16``, ``e4m3``, ``e2m1`` or ``e5m6``. Its largest number is no limit here; NaN stays.
    """
    to = grid(target)
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    size = bits & 0x7FFFFFFF
    rounded = size + (random >> (32 - to.cut)) & -(1 << to.cut)
    if to.normal:
        steps = values.abs() / torch.full_like(values, to.step)
        whole = steps.floor()
        up = ((random >> 8).float() * 2.0**-24 < steps - whole).float()
        small = ((whole + up) * to.step).view(torch.int32).to(torch.int64)
        rounded = torch.where(size < to.normal, small, rounded)
    found = (rounded | bits & 0x80000000).to(torch.int32).view(torch.float32)
    return torch.where(values.isnan(), values, found)
