"""Rows in token order as the mapping that the reduction reads."""

from __future__ import annotations

import torch
from torch import Tensor

_tables: dict[torch.device, Tensor] = {}
_weights: dict[tuple[torch.device, float], Tensor] = {}
_SIZE = 1 << 16


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def in_token_order(tokens: int, topk: int, device: torch.device) -> Tensor | None:
    """int32 [T, K] with entry t * K + k. None if the table would have to grow while a CUDA graph is captured."""
    table = _tables.get(device)
    if table is None or table.numel() < tokens * topk:
        if _capturing(device):
            return None
        size = max(tokens * topk, _SIZE)
        table = _tables[device] = torch.arange(size, dtype=torch.int32, device=device)
    return table[: tokens * topk].view(tokens, topk)


def constant(value: float, tokens: int, topk: int, device: torch.device) -> Tensor | None:
    """float32 [T, K] of one value, as :func:`in_token_order`."""
    table = _weights.get((device, value))
    if table is None or table.numel() < tokens * topk:
        if _capturing(device):
            return None
        size = max(tokens * topk, _SIZE)
        table = _weights[device, value] = torch.full((size,), value, device=device)
    return table[: tokens * topk].view(tokens, topk)
