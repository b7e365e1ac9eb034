"""The Engram gate for models that are trained: forward and backward by the kernels, gradients by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tk_serving.engram.engram_gate_bwd import engram_gate_bwd
from tk_serving.engram.engram_gate_fwd import engram_gate_fwd
from tk_serving.engram.fused_weight import fused_weight
from tk_serving.engram.grad_w_reduce import grad_w_reduce
from tk_serving.modeling.gradients import Accumulator

__all__ = ["EngramGate", "engram_gate"]


def engram_gate(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
) -> Tensor:
    """Hidden states plus the gated value, differentiable; the residual is added here. Mind the order: clamp before eps.

    The gradient of a weight is added to its ``main_grad`` where it has one, and otherwise returned in its own dtype.
    Nothing is saved while gradients are disabled.

    Args:
        hidden_states: bfloat16 [..., h, D], D a multiple of 256.
        k: bfloat16 [..., h, D], dense last dimension.
        v: bfloat16 [..., D], dense last dimension.
        weight_hidden, weight_embed: bfloat16 [h, D].
        clamp_value: smallest magnitude of the similarity; positive.
        eps: added to the mean squares; positive.

    Returns:
        bfloat16 [..., h, D].
    """
    tensors = (hidden_states, k, v, weight_hidden, weight_embed)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _EngramGate.apply(*tensors, clamp_value, eps)
    weight = fused_weight(weight_hidden, weight_embed)
    output, *_ = engram_gate_fwd(*_rows(hidden_states, k, v), weight, eps, clamp_value, save_for_backward=False)
    return output.view(hidden_states.shape)


class EngramGate(nn.Module):
    """:func:`engram_gate` with its two weights.

    Args:
        streams: h.
        hidden_size: D, a multiple of 256.
    """

    def __init__(
        self,
        streams: int,
        hidden_size: int,
        *,
        clamp_value: float = 1e-6,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.clamp_value, self.eps = clamp_value, eps
        self.weight_hidden = nn.Parameter(torch.ones(streams, hidden_size, dtype=torch.bfloat16, device=device))
        self.weight_embed = nn.Parameter(torch.ones(streams, hidden_size, dtype=torch.bfloat16, device=device))

    def forward(self, hidden_states: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return engram_gate(hidden_states, k, v, self.weight_hidden, self.weight_embed, self.clamp_value, self.eps)

    def extra_repr(self) -> str:
        streams, hidden_size = self.weight_hidden.shape
        return f"{streams}, {hidden_size}, clamp_value={self.clamp_value}, eps={self.eps}"


class _EngramGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        k: Tensor,
        v: Tensor,
        weight_hidden: Tensor,
        weight_embed: Tensor,
        clamp_value: float,
        eps: float,
    ) -> Tensor:
        weight = fused_weight(weight_hidden, weight_embed)
        rows = _rows(hidden_states, k, v)
        output, *saved = engram_gate_fwd(*rows, weight, eps, clamp_value)
        ctx.save_for_backward(*rows, weight_hidden, weight_embed, weight, *saved)
        ctx.clamp_value = clamp_value
        ctx.shapes = hidden_states.shape, k.shape, v.shape
        return output.view(hidden_states.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, k, v, weight_hidden, weight_embed, weight, *saved = ctx.saved_tensors
        grad_out = grad_out.reshape(x.shape).contiguous()
        *gradients, partial = engram_gate_bwd(grad_out, x, k, v, weight, *saved, ctx.clamp_value)
        gradients = [g.view(shape) for g, shape in zip(gradients, ctx.shapes, strict=True)]
        if any(ctx.needs_input_grad[3:5]):
            pairs = [
                Accumulator(w, needed)
                for w, needed in zip((weight_hidden, weight_embed), ctx.needs_input_grad[3:5], strict=True)
            ]
            grad_w_reduce(partial, weight_hidden, weight_embed, *(pair.buffer for pair in pairs))
            gradients += [pair.result() for pair in pairs]
        else:
            gradients += [None, None]
        return *gradients, None, None


def _rows(hidden_states: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments with all leading dimensions as one."""
    shape = hidden_states.shape[-2:]
    return hidden_states.reshape(-1, *shape).contiguous(), k.reshape(-1, *shape), v.reshape(-1, shape[-1])
