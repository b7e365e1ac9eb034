"""SwiGLU of dense layers and shared experts, with or without a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tk_serving import quant
from tk_serving.modeling.quant import FORMATS, swiglu
from tk_serving_patches.transformers._calls import Seam, is_silu, refusal, rows_dtype, verdict

SWIGLU = Seam("swiglu", ("swiglu_forward", "swiglu_backward"))


@verdict
def rows_refusal(
    device: torch.device, dtype: torch.dtype, width: int, limit: float | None, training: bool
) -> str | None:
    """Why the operators do not take rows of gate and up, ``width`` values together."""
    if dtype not in FORMATS:
        return f"activations of {dtype}"
    rows = torch.empty(1, width, dtype=dtype, device="meta")
    reason = refusal(quant.swiglu_forward, device, rows, FORMATS[dtype], clamp_value=limit)
    if reason is None and training:
        reason = refusal(quant.swiglu_backward, device, rows, rows[:, : width // 2].contiguous(), clamp_value=limit)
    return reason


def refuses(mlp: Any) -> str | None:
    return None if is_silu(mlp.act_fn) else f"activation {type(mlp.act_fn).__name__}"


def mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    """For every MLP with gate_proj, up_proj and down_proj."""

    def forward(self: Any, x: Tensor) -> Tensor:
        limit = getattr(self, "limit", None)
        width = 2 * self.intermediate_size
        reason = refuses(self) or rows_refusal(x.device, rows_dtype(x), width, limit, torch.is_grad_enabled())
        if reason is not None:
            SWIGLU.leave(reason)
            return original(self, x)
        rows = swiglu(_gate_and_up(self, x), clamp_value=limit)
        return self.down_proj(rows.view(*x.shape[:-1], rows.shape[-1]))

    return forward


def _gate_and_up(mlp: Any, x: Tensor) -> Tensor:
    """Both projections side by side, [N, 2I]."""
    projections = (mlp.gate_proj, mlp.up_proj)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not all(_is_plain(p, x) for p in projections):
        return torch.cat([p(x) for p in projections], dim=-1).flatten(0, -2)
    # Without a graph to record, the products write into one buffer and nothing is copied.
    rows = x.flatten(0, -2)
    both = rows.new_empty(len(rows), sum(p.out_features for p in projections))
    for projection, half in zip(projections, both.chunk(2, dim=1), strict=True):
        torch.mm(rows, projection.weight.t(), out=half)
    return both


def _is_plain(projection: nn.Module, x: Tensor) -> bool:
    """The module is a matrix product and nothing else: no bias, hooks, adapters, quantisation or sharding."""
    return (
        type(projection) is nn.Linear
        and projection.bias is None
        and type(projection.weight) is nn.Parameter
        and projection.weight.dtype == x.dtype
        and projection.weight.device == x.device
        and not torch.is_autocast_enabled(x.device.type)
        and "forward" not in projection.__dict__
        and not (projection._forward_hooks or projection._forward_pre_hooks or projection._backward_hooks)
    )
