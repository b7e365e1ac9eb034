"""The layouts that kernel.cu reads.

Weights, 64 rows x 128 of k: 4352 bytes at [expert][n / 64][k / 128]. Thread t = 32 w + 4 g + q of a warp group holds
the rows n = 16 w + g + 8 r and k = 32 q + 8 s + j: 16 bytes at 2048 r + 16 t, word s for the eight codes j (magnitude
of j: bits 4 j to 4 j + 2; sign: bit 7 + 8 j for j < 4, else 3 + 8 (j - 4)); at 4096 + 2 t + r the exponent of row and
group of 32, plus 13. So 16 bytes are 32 codes of one scale, for which one table of eight bytes is made.
Activations: the byte of k = 32 q + 8 s + 4 h + i lies at 32 s + 16 h + 4 q + i of its 128.
"""

import torch
from torch import Tensor

TILE = 4352
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BIAS = 13


def _shifts(device: torch.device) -> tuple[Tensor, Tensor]:
    j = torch.arange(8, device=device)
    return 4 * j, torch.where(j < 4, 7 + 8 * j, 3 + 8 * (j - 4))


def pack(codes: Tensor, exponents: Tensor) -> Tensor:
    """Codes uint8 [E, N, K] and exponents uint8 [E, N, K / 32], plus 13, to uint8 [E, N / 64, K / 128, 4352]."""
    experts, n, k = codes.shape
    c = codes.view(experts, n // 64, 4, 2, 8, k // 128, 4, 4, 8).long()  # e, nb, w, r, g, kb, q, s, j
    mag, sign = _shifts(codes.device)
    words = ((c & 7) << mag).sum(-1) + ((c >> 3) << sign).sum(-1)
    words = words.permute(0, 1, 5, 3, 2, 4, 6, 7)  # e, nb, kb, r, w, g, q, s
    octets = torch.stack([(words >> (8 * b)) & 255 for b in range(4)], -1).to(torch.uint8)
    x = exponents.view(experts, n // 64, 4, 2, 8, k // 128, 4).permute(0, 1, 5, 2, 4, 6, 3)  # e, nb, kb, w, g, q, r
    return torch.cat([octets.reshape(experts, n // 64, k // 128, 4096), x.reshape(experts, n // 64, k // 128, 256)], -1)


def unpack(tiles: Tensor) -> Tensor:
    """One expert, uint8 [N / 64, K / 128, 4352], to float32 [N, K] without the scales of rows."""
    nb, kb, _ = tiles.shape
    o = tiles[..., :4096].reshape(nb, kb, 2, 4, 8, 4, 4, 4).long()  # nb, kb, r, w, g, q, s, byte
    words = torch.stack([o[..., b] << (8 * b) for b in range(4)]).sum(0)
    mag, sign = _shifts(tiles.device)
    w = words[..., None]
    v = VALUES.to(tiles.device)[(w >> mag) & 7] * (1 - 2 * ((w >> sign) & 1)).float()
    x = tiles[..., 4096:].reshape(nb, kb, 4, 8, 4, 2).permute(0, 1, 5, 2, 3, 4).float()  # nb, kb, r, w, g, q
    v = v * torch.exp2(x - BIAS)[..., None, None]
    return v.permute(0, 3, 2, 4, 1, 5, 6, 7).reshape(64 * nb, 128 * kb)


def permute(x: Tensor) -> Tensor:
    """Bytes [rows, K] in the order that the kernel reads."""
    r, k = x.shape
    return x.view(r, k // 128, 4, 4, 2, 4).permute(0, 1, 3, 4, 2, 5).contiguous().view(r, k)
