"""Arithmetic of the references. Everything also works in float64, for gradient checks."""

import torch
from torch import Tensor

from tk_serving.arithmetic import fma
from tk_serving.mhc._shapes import MULT


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in the dtype of c, with a single rounding."""
    return fma(a, b, c) if c.dtype == torch.float32 else torch.addcmul(c, a.to(c.dtype), b.to(c.dtype))


def weighted_sum(streams: Tensor, mix: Tensor) -> Tensor:
    """Sum of the streams [..., 4, H], each times its mix [..., 4, 1], in ascending order and in the dtype of mix."""
    total = torch.zeros_like(streams[..., 0, :], dtype=mix.dtype)
    for i in range(MULT):
        total = multiply_add(mix[..., i, :], streams[..., i, :], total)
    return total


def sigmoid(z: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-z))


def tf32(x: Tensor) -> Tensor:
    """float32 rounded to the 10 mantissa bits of TF32: half up in magnitude; inf and NaN unchanged, as is float64."""
    if x.dtype == torch.float64:
        return x
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def ascending_sum(parts: Tensor) -> Tensor:
    """Sum over the first dimension, from the first to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def inverse_rms(square_sum: Tensor, size: int, eps: float) -> Tensor:
    """1 / sqrt(square_sum / size + eps).

    The divisor is a tensor: torch multiplies by the reciprocal of a Python number on CUDA, which changes the last bit.
    """
    return 1.0 / (square_sum / torch.full_like(square_sum, size) + eps).sqrt()


def column_scale(scale: Tensor) -> Tensor:
    """The scale of each of the 24 mixes, of the three that a sublayer has."""
    return torch.cat([scale[group].expand(width) for group, width in enumerate((4, 4, 16))])
