"""Gradients of weights that are summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


class Accumulator:
    """Where the gradient of a weight is summed in float32, and what autograd gets of it.

    Attributes:
        buffer: float32, contiguous, of the weight's shape, to add the gradient to: the weight's ``main_grad`` where it
            has one of that kind.
    """

    def __init__(self, weight: Tensor, needed: bool) -> None:
        self.weight, self.needed = weight, needed
        owned: Tensor | None = getattr(weight, "main_grad", None) if needed else None
        self.main_grad = owned
        if owned is not None and owned.dtype == torch.float32 and owned.is_contiguous():
            self.buffer = owned
        else:
            self.buffer = torch.zeros_like(weight, dtype=torch.float32)

    def result(self) -> Tensor | None:
        """None where the gradient went to ``main_grad`` or nobody asked for it; else the gradient."""
        if not self.needed:
            return None
        if self.main_grad is None:
            return self.buffer.to(self.weight.dtype)
        if self.buffer is not self.main_grad:
            self.main_grad += self.buffer
        return None
