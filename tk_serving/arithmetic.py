"""Arithmetic that torch lacks and references need bit for bit."""

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32 a * b + c with a single rounding, on any device.

    The product is exact in float64. The sum is rounded to odd there, so that the rounding to float32 that follows
    sees on which side of a tie the exact value lies.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    even = (total.view(torch.int64) & 1) == 0
    up = torch.full((), torch.inf, dtype=torch.float64, device=total.device)
    total = torch.where(even & (error > 0), torch.nextafter(total, up), total)
    total = torch.where(even & (error < 0), torch.nextafter(total, -up), total)
    return total.float()


def wide(x: Tensor) -> Tensor:
    """float32, or float64 as it is: references that use it also serve for gradient checks."""
    return x if x.dtype == torch.float64 else x.float()


def sqrt(x: Tensor) -> Tensor:
    """float32 square root, correctly rounded on any device; torch's own may miss the last bit on a CPU."""
    return x.double().sqrt().float()
