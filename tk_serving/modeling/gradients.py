"""Gradients of weights that are summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


class Accumulator:
    """Where the gradient of a weight is summed in float32, and what autograd gets of it."""

    def __init__(self, weight: Tensor, needed: bool) -> None:
        self.weight, self.needed = weight, needed
        self.main_grad = getattr(weight, "main_grad", None) if needed else None
        direct = self.main_grad is not None and self.main_grad.dtype == torch.float32 and self.main_grad.is_contiguous()
        self.buffer = self.main_grad if direct else torch.zeros_like(weight, dtype=torch.float32)

    def result(self) -> Tensor | None:
        if not self.needed:
            return None
        if self.main_grad is None:
            return self.buffer.to(self.weight.dtype)
        if self.buffer is not self.main_grad:
            self.main_grad += self.buffer
        return None
