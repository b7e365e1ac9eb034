"""RMSNorm, with a weight and without."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tk_serving import quant
from tk_serving.modeling.quant import FORMATS, rms_norm
from tk_serving_patches.transformers._calls import Seam, refusal, verdict

NORM = Seam("rms-norm", ("norm_forward", "norm_backward"))


@verdict
def _refusal(device: torch.device, dtype: torch.dtype, size: int, weighted: bool, training: bool) -> str | None:
    if dtype not in FORMATS:
        return f"activations of {dtype}"
    rows = torch.empty(1, size, dtype=dtype, device="meta")
    weight = torch.empty(size, dtype=dtype, device="meta") if weighted else None
    reason = refusal(quant.norm_forward, device, rows, weight, 1e-6)
    if reason is None and training:
        rstd = torch.empty(1, device="meta")
        reason = refusal(quant.norm_backward, device, rows, rows, weight, rstd)
    return reason


def weighted(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``DeepseekV*RMSNorm``."""
    # V4 of transformers 5.20 and later keeps the dtype of the rows where the weight is float32; others promote.
    probe = original(SimpleNamespace(weight=torch.ones(1), variance_epsilon=0.0), torch.ones(1, dtype=torch.bfloat16))
    keeps_dtype = probe.dtype == torch.bfloat16

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x, weight = hidden_states, self.weight
        if weight.dtype == x.dtype or (keeps_dtype and weight.dtype == torch.float32):
            reason = _refusal(x.device, weight.dtype, x.shape[-1], True, torch.is_grad_enabled())
        else:
            reason = f"a weight of {weight.dtype} for activations of {x.dtype}"
        if reason is not None:
            NORM.leave(reason)
            return original(self, hidden_states)
        return rms_norm(x.to(weight.dtype), weight, self.variance_epsilon).to(x.dtype)

    return forward


def unweighted(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``DeepseekV4UnweightedRMSNorm``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        reason = _refusal(x.device, x.dtype, x.shape[-1], False, torch.is_grad_enabled())
        if reason is not None:
            NORM.leave(reason)
            return original(self, x)
        return rms_norm(x, None, self.eps)

    return forward
