"""Rows in token order as the mapping that the reduction reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SIZE = 1 << 16
_tables: dict[torch.device, Tensor] = {}
_weights: dict[tuple[torch.device, float], Tensor] = {}
_outgrown: list[Tensor] = []  # captured CUDA graphs go on reading them


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _table(
    tables: dict[Any, Tensor], key: Any, size: int, device: torch.device, make: Callable[[int], Tensor]
) -> Tensor | None:
    table = tables.get(key)
    if table is None or table.numel() < size:
        if _capturing(device):
            return None
        if table is not None:
            _outgrown.append(table)
        table = tables[key] = make(max(_SIZE, 1 << (size - 1).bit_length()))
    return table[:size]


def in_token_order(tokens: int, topk: int, device: torch.device) -> Tensor | None:
    """int32 [T, K] with entry t * K + k. None if the table would have to grow while a CUDA graph is captured."""
    make = functools.partial(torch.arange, dtype=torch.int32, device=device)
    table = _table(_tables, device, tokens * topk, device, make)
    return None if table is None else table.view(tokens, topk)


def constant(value: float, tokens: int, topk: int, device: torch.device) -> Tensor | None:
    """float32 [T, K] of one value, as :func:`in_token_order`."""

    def make(size: int) -> Tensor:
        return torch.full((size,), value, dtype=torch.float32, device=device)

    table = _table(_weights, (device, value), tokens * topk, device, make)
    return None if table is None else table.view(tokens, topk)
