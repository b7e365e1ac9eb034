"""Number formats of quantised data: their limits, and encoding and decoding in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 3.4028234663852886e38  # the largest finite float32


@dataclass(frozen=True)
class Format:
    """One storage format of quantised values.

    Attributes:
        maximum: largest magnitude of a code.
        floor: smallest amax of a block.
        bytes: storage of eight values.
        mantissa: bits behind the leading one.
        smallest: the smallest normal number.
    """

    name: str
    dtype: torch.dtype
    maximum: float
    floor: float
    bytes: int
    mantissa: int
    smallest: float

    @property
    def storage(self) -> str:
        """The storage type's name in kernels."""
        return str(self.dtype).removeprefix("torch.")

    def columns(self, hidden: int) -> int:
        """Width in storage of a row of ``hidden`` values."""
        return hidden * self.bytes // 8


FORMATS = {
    "e4m3": Format("e4m3", torch.float8_e4m3fn, 448.0, 1e-4, 8, 3, 2.0**-6),
    "e2m1": Format("e2m1", torch.int8, 6.0, 6 * 2.0**-126, 4, 1, 1.0),
    "e5m6": Format("e5m6", torch.uint8, 65024.0, 1e-4, 12, 6, 2.0**-14),
}
"""``e2m1``: two values in a byte, the first in the low nibble. ``e5m6``: eight values in twelve bytes."""


def encode(values: Tensor, fmt: str) -> Tensor:
    """Round float32 values to the nearest code, ties to even, saturating; NaN has a code of its own in each format."""
    return {"e4m3": encode_e4m3, "e2m1": encode_e2m1, "e5m6": encode_e5m6}[fmt](values)


def decode(data: Tensor, fmt: str) -> Tensor:
    """float32 values of the codes, exactly."""
    return {"e4m3": Tensor.float, "e2m1": decode_e2m1, "e5m6": decode_e5m6}[fmt](data)


def encode_e4m3(values: Tensor) -> Tensor:
    """float8_e4m3fn; NaN of either sign is 0x7F."""
    codes = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes).view(torch.float8_e4m3fn)


def encode_e2m1(values: Tensor) -> Tensor:
    """int8 [..., H / 2]; the sign of zero is kept, NaN is +6."""
    size = values.abs()
    code = (size > 0.25).to(torch.int32) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    code = torch.where(values.isnan(), 7, code + 8 * torch.signbit(values))
    return (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8).view(torch.int8)


def decode_e2m1(data: Tensor) -> Tensor:
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=data.device)
    codes = data.view(torch.uint8).to(torch.int32)
    codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return torch.where(codes >= 8, -table[codes & 7], table[codes & 7])


def encode_e5m6(values: Tensor) -> Tensor:
    """uint8 [..., 3 H / 2]; NaN is +65024.

    Truncated to float16 first, then rounded to nearest even by the bits that are cut; below 2^-14 the same bits of the
    float32 pattern decide, which keeps the bytes of the format although it is no true rounding there.
    """
    values = torch.where(values.isnan(), 65024.0, values.clamp(-65024.0, 65024.0)).contiguous()
    half = values.to(torch.float16)
    bits = half.view(torch.int16).to(torch.int32) - (half.float().abs() > values.abs()).to(torch.int32)
    code = (bits & 0xFFFF) >> 4
    low = values.view(torch.int32) & 0x1FFFF
    code = (code + (low + (code & 1) > 0x10000)).to(torch.int64).unflatten(-1, (-1, 8))
    c = code.unbind(-1)
    words = (
        c[0] << 20 | c[1] << 8 | c[2] >> 4,
        (c[2] & 15) << 28 | c[3] << 16 | c[4] << 4 | c[5] >> 8,
        (c[5] & 255) << 24 | c[6] << 12 | c[7],
    )
    return torch.stack(words, dim=-1).to(torch.int32).flatten(-2).view(torch.uint8)


def decode_e5m6(data: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 8, device=data.device)
    words = (data.to(torch.int64).unflatten(-1, (-1, 3, 4)) << shifts).sum(-1)  # bytes, as the data may start anywhere
    w = words.unbind(-1)
    codes = (
        w[0] >> 20,
        w[0] >> 8,
        w[0] << 4 | w[1] >> 28,
        w[1] >> 16,
        w[1] >> 4,
        w[1] << 8 | w[2] >> 24,
        w[2] >> 12,
        w[2],
    )
    bits = (torch.stack(codes, dim=-1).flatten(-2) & 0xFFF) << 4
    return bits.to(torch.int16).view(torch.float16).float()
