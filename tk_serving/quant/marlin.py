"""The Marlin layout of FP4 weights with 1 x 32 scales, into which engines repack the experts of a checkpoint.

A weight [N, K] is stored as int32 [K / 16, 2 N]: tiles of 16 columns (of K) by 64 rows (of N), 128 words each. Word
4 l + w of a tile belongs to lane l of a warp and holds, for rows 16 w + l / 4 and eight further, the columns 2 (l % 4)
+ {0, 1, 8, 9}: the nibbles of both rows for columns 0 and 8, then those for columns 1 and 9. The exponents of the
scales [N, K / 32] are stored as bytes [K / 32, N]: of 64 rows, the eight that a lane needs lie together, in the order
0, 16, 8, 24, 32, 48, 40, 56. This is the order of operands of the 16-bit matrix instruction (Frantar et al., "MARLIN",
2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tk_serving.quant import scales

TILE_N, TILE_K, GROUP = 64, 16, 32

_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the value, of (row, column) pairs in order, that each nibble of a word holds
_ROWS = (0, 2, 1, 3, 4, 6, 5, 7)  # the group of eight rows of each byte of eight exponents; its own inverse


def unpack_codes(data: Tensor) -> Tensor:
    """int8 e2m1 [..., N, K / 2], two codes in a byte, of int32 [..., K / 16, 2 N]."""
    *lead, tiles_k, words = data.shape
    places = torch.tensor([_NIBBLES.index(value) for value in range(8)], dtype=torch.int32, device=data.device)
    codes = (data[..., None] >> (4 * places) & 15).to(torch.uint8)
    codes = codes.view(-1, tiles_k, words // 128, 8, 4, 4, 2, 2, 2)  # of a tile: row, quarter, w, eight, half, next
    codes = codes.permute(0, 2, 5, 6, 3, 1, 7, 4, 8).reshape(*lead, words // 2, tiles_k * 8, 2)
    return (codes[..., 0] | codes[..., 1] << 4).view(torch.int8)


def pack_codes(data: Tensor) -> Tensor:
    """int32 [..., K / 16, 2 N] of int8 e2m1 [..., N, K / 2]: the inverse of :func:`unpack_codes`."""
    *lead, n, half_k = data.shape
    data = data.view(torch.uint8)
    codes = torch.stack((data & 15, data >> 4), dim=-1).view(-1, n // TILE_N, 4, 2, 8, half_k // 8, 2, 4, 2)
    codes = codes.permute(0, 5, 1, 4, 7, 2, 3, 6, 8).reshape(*lead, half_k // 8, 2 * n, 8)
    words = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=data.device)
    for nibble, value in enumerate(_NIBBLES):
        words |= codes[..., value].to(torch.int32) << 4 * nibble
    return words


def unpack_exponents(sf: Tensor) -> Tensor:
    """uint8 biased exponents [..., N, K / 32] of the stored bytes [..., K / 32, N]."""
    *lead, groups, n = sf.shape
    order = torch.tensor(_ROWS, device=sf.device)
    by_rows = sf.view(torch.uint8).view(*lead, groups, n // TILE_N, 8, 8)[..., order]  # of 64 rows: r % 8, r / 8
    return by_rows.transpose(-1, -2).reshape(*lead, groups, n).transpose(-1, -2).contiguous()


def pack_exponents(exponents: Tensor) -> Tensor:
    """Bytes [..., K / 32, N] of uint8 biased exponents [..., N, K / 32]: the inverse of :func:`unpack_exponents`."""
    *lead, n, groups = exponents.shape
    by_rows = exponents.transpose(-1, -2).reshape(*lead, groups, n // TILE_N, 8, 8).transpose(-1, -2)
    return by_rows[..., torch.tensor(_ROWS, device=exponents.device)].reshape(*lead, groups, n)


def extreme_exponents(sf: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """int32 [..., N / block, K / block], twice: least and largest exponent of each block, of the stored bytes."""
    *lead, groups, n = sf.shape
    # The order within 64 rows does not matter here.
    blocks = sf.view(torch.uint8).view(*lead, groups * GROUP // block, block // GROUP, n // block, block)
    least, most = (
        reduce(blocks, dim=(-3, -1)).transpose(-1, -2).to(torch.int32) for reduce in (torch.amin, torch.amax)
    )
    return least.contiguous(), most.contiguous()


def block_scales(sf: Tensor, raise_by: int, block: int = 128) -> Tensor:
    """float32 [..., N / block, K / block]: 2^-raise_by times the largest scale of each block, at least 2^-127."""
    return scales.of_exponents((extreme_exponents(sf, block)[1] - raise_by).clamp(min=0))
