"""The layout of FP4 weights that :func:`grouped_gemm_fp8_fp4` reads, and how they come to it from Marlin's.

Weights [M, K] of an expert are stored as uint8 [M / 64, K / 128, 4352], tiles of 64 rows by 128 columns. Thread
t = 32 w + 4 g + q of a warp group holds, of the rows m = 16 w + g + 8 r, the columns k = 32 s + 16 h + 4 q + i: what it
multiplies in step s of a matrix instruction. Its 16 bytes lie at 2048 r + 16 t: word s has the eight codes j = 4 h + i,
the magnitude of j in the bits 4 j to 4 j + 2, its sign in bit 7 + 8 j for j < 4, else in 3 + 8 (j - 4), where the
look-up needs it. The byte at 4096 + 64 w + 8 g + 4 r + s is the exponent of group s of the row.

e5m2 holds a code times any of 27 powers of two; the rest of a scale, 2^n, is the same for a whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tk_serving.quant import marlin
from tk_serving.quant.formats import decode_e2m1

ROWS, COLUMNS, GROUP, TILE = 64, 128, 32, 4352
REACH = 26
"""Scales of a row may lie so many powers of two below the largest."""

CODES_AT_ONCE = 1 << 26
"""So many are converted together, in several times as many bytes."""

CODES = ROWS * COLUMNS // 2  # bytes of a tile before the exponents
_BIAS = 13  # of the stored exponents: 2^-13 ... 2^13


def from_marlin(codes: Tensor, sf: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Weights in Marlin's layout as tiles and scales of rows: the same values where :func:`exact` holds.

    A few experts at a time, so that little memory is needed besides the result.

    Args:
        codes: int32 [E, K / 16, 2 M], see :mod:`tk_serving.quant.marlin`.
        sf: one byte [E, K / 32, M], biased exponents.
        out: preallocated results, contiguous.

    Returns:
        uint8 [E, M / 64, K / 128, 4352] and float32 [E, M].
    """
    experts, m, k = codes.shape[0], codes.shape[2] // 2, codes.shape[1] * marlin.TILE_K
    if out is None:
        tiles = torch.empty(experts, m // ROWS, k // COLUMNS, TILE, dtype=torch.uint8, device=codes.device)
        out = tiles, torch.empty(experts, m, dtype=torch.float32, device=codes.device)
    step = max(1, CODES_AT_ONCE // (m * k))
    for part in (slice(e, e + step) for e in range(0, experts, step)):
        exponents = marlin.unpack_exponents(sf[part])
        most = exponents.amax(dim=-1).int()
        out[1][part] = _powers(most - (REACH - _BIAS))
        above = (exponents.int() - most[..., None] + REACH).clamp(min=0).to(torch.uint8)
        out[0][part] = pack(marlin.unpack_codes(codes[part]), above)
    return out


def to_marlin(tiles: Tensor, row_sf: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales in Marlin's layout of tiles and scales of rows: the inverse of :func:`from_marlin`."""
    codes, above = unpack(tiles)
    most = torch.log2(row_sf.double()).round().int() + 127 + REACH - _BIAS
    exponents = above.int() + most[..., None] - REACH
    return marlin.pack_codes(codes), marlin.pack_exponents(exponents.to(torch.uint8))


def exact(codes: Tensor, sf: Tensor) -> bool:
    """Whether tiles hold the weights exactly: the scales of a row are within 2^26 of its largest.

    Scales of groups that hold only zeros do not count. Reads the result on the host.

    Args:
        codes: int32 [E, K / 16, 2 M], in Marlin's layout.
        sf: one byte [E, K / 32, M], biased exponents.
    """
    sf = sf.view(torch.uint8)
    wide = (sf.amax(dim=1).int() - sf.amin(dim=1).int() > REACH).any(dim=1)
    return all(_exact_codes(codes[e], sf[e]) for e in wide.nonzero()[:, 0].tolist())


def _exact_codes(codes: Tensor, sf: Tensor) -> bool:
    """Of one expert: whether the groups with scales too small hold only zeros."""
    exponents = marlin.unpack_exponents(sf).int()
    outside = exponents < exponents.amax(dim=-1, keepdim=True) - REACH
    held = (marlin.unpack_codes(codes).view(torch.uint8) & 0x77).unflatten(-1, (-1, GROUP // 2)).any(dim=-1)
    return not bool((outside & held).any())


def pack(codes: Tensor, exponents: Tensor) -> Tensor:
    """uint8 tiles [..., M / 64, K / 128, 4352] of codes and exponents.

    Args:
        codes: int8 [..., M, K / 2], two in a byte.
        exponents: uint8 [..., M, K / 32], 0 to 26 for 2^-13 to 2^13.
    """
    *lead, m, half_k = codes.shape
    nb, kb = m // ROWS, half_k // (COLUMNS // 2)
    halves = codes.contiguous().view(torch.int16).view(-1, nb, 4, 2, 8, kb, 4, 2, 4)  # w, r, g, kb, s, h, q
    words = halves.permute(0, 1, 5, 3, 2, 4, 8, 6, 7).contiguous().view(torch.int32)
    words = words & 0x77777777 | _spread(words & 0x8888) << 4 | _spread(words >> 16 & 0x8888)
    above = exponents.view(-1, nb, 4, 2, 8, kb, 4).permute(0, 1, 5, 2, 4, 3, 6)  # nb, kb, w, g, r, s
    parts = (words.view(torch.uint8).view(-1, nb, kb, CODES), above.reshape(-1, nb, kb, TILE - CODES))
    return torch.cat(parts, dim=-1).view(*lead, nb, kb, TILE)


def unpack(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and exponents of tiles: the inverse of :func:`pack`."""
    *lead, nb, kb, _ = tiles.shape
    words = tiles[..., :CODES].contiguous().view(torch.int32)
    words = words & 0x77777777 | _gather(words >> 4) | _gather(words) << 16
    halves = words.view(torch.int16).view(-1, nb, kb, 2, 4, 8, 4, 4, 2)  # nb, kb, r, w, g, q, s, h
    codes = halves.permute(0, 1, 4, 3, 5, 2, 7, 8, 6).contiguous().view(torch.int8)
    above = tiles[..., CODES:].reshape(-1, nb, kb, 4, 8, 2, 4).permute(0, 1, 3, 5, 4, 2, 6)
    m, k = nb * ROWS, kb * COLUMNS
    return codes.view(*lead, m, k // 2), above.reshape(*lead, m, k // GROUP)


def values(tiles: Tensor, row_sf: Tensor) -> Tensor:
    """float32 [..., M, K]: the weights."""
    codes, above = unpack(tiles)
    v = decode_e2m1(codes) * torch.exp2(above.float() - _BIAS).repeat_interleave(GROUP, dim=-1)
    return v * row_sf[..., None]


def _spread(x: Tensor) -> Tensor:
    """The four nibbles of 16 bits, one in each byte."""
    x = (x | x << 8) & 0x00FF00FF
    return (x | x << 4) & 0x0F0F0F0F


def _gather(x: Tensor) -> Tensor:
    """The signs of the four nibbles that lie in the lower halves of bytes, in 16 bits: undoes :func:`_spread`."""
    x = x & 0x08080808
    x = (x | x >> 4) & 0x00FF00FF
    return (x | x >> 8) & 0x0000FFFF


def _powers(exponents: Tensor) -> Tensor:
    """float32 2^(e - 127), exactly; below the normal numbers too."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents - 127).float()
