"""Differentiable SwiGLU and RMSNorm, and rounding to a quantised format in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tk_serving import quant

FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""The dtypes of rows that the operators take, with the names that they give them."""


def swiglu(x: Tensor, *, clamp_value: float | None = None, row_weights: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, times a weight of the row if given; float32 inside, rounded once.

    Args:
        x: bfloat16 or float32 [N, 2H], contiguous, gate left of up; H a multiple of 8.
        clamp_value: limits the gate from above and up on both sides; their gradients are zero outside.
        row_weights: float32 [N].

    Returns:
        [N, H] in the dtype of x.
    """
    return _SwiGLU.apply(x, row_weights, clamp_value)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_weights: Tensor | None, clamp_value: float | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, row_weights)
        ctx.clamp_value = clamp_value
        return quant.swiglu_forward(x, FORMATS[x.dtype], topk_weights=row_weights, clamp_value=clamp_value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, row_weights = ctx.saved_tensors
        of_x, of_weights, _ = quant.swiglu_backward(
            x, grad.contiguous(), topk_weights=row_weights, clamp_value=ctx.clamp_value
        )
        return of_x, of_weights, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension; float32 inside, rounded once.

    Args:
        x: bfloat16 or float32 [..., H], H a multiple of 16 up to 16384.
        weight: [H] in the dtype of x, or None.
        eps: added to the mean square.
    """
    rows = x.reshape(-1, x.shape[-1])
    return _RMSNorm.apply(rows, weight, eps).view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:  # type: ignore[override]
        out, rstd, _ = quant.norm_forward(x, weight, eps, with_rstd=any(ctx.needs_input_grad))
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        of_x, of_weight = quant.norm_backward(grad.contiguous(), x, weight, rstd)
        return of_x, of_weight, None


def round_through(x: Tensor, fmt: str, num_per_channels: int, *, round_sf: bool = False) -> Tensor:
    """What :func:`per_token_cast` and :func:`per_token_cast_back` leave of x; the gradient passes unchanged.

    Args:
        x: bfloat16 or float32 [..., H], contiguous.
        fmt: ``e4m3`` or ``e2m1``.
        num_per_channels: columns of a group: 16, 32, 64 or 128, dividing H.
        round_sf: scales are powers of two.
    """
    return _RoundThrough.apply(x, fmt, num_per_channels, round_sf)


class _RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: str, num_per_channels: int, round_sf: bool) -> Tensor:  # type: ignore[override]
        rounded = x.clone()
        quant.per_token_cast_and_cast_back(rounded.view(-1, x.shape[-1]), fmt, num_per_channels, round_sf)
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None, None
