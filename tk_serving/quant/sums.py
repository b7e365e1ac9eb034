"""Sums over a row in the order of the kernels, so that references have the same bits."""

import torch
from torch import Tensor

TILE = 512
"""Columns of a warp: two halves of 32 lanes with eight columns each."""

WARPS = 32
"""Most warps of a row, hence of at most 16384 columns."""


def warps(hidden: int) -> int:
    """Warps that share a row."""
    return -(-hidden // TILE)


def fold(values: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two, by adding neighbours."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def row_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension of a float32 tensor."""
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % TILE)).unflatten(-1, (-1, 2, 32, 8))
    lanes = fold(values)
    parts = fold(lanes[..., 0, :] + lanes[..., 1, :]).unbind(-1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
