"""Inputs that several tests of the family share."""

import torch

HIDDEN = 64


def bf16(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def f32(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def formula(rows, columns):
    """The values of the public reports: ((7919 i) mod 4001 - 2000) / 512 at flat index i, in bfloat16."""
    return (((7919 * torch.arange(rows * columns)) % 4001 - 2000) / 512).bfloat16().view(rows, columns)
