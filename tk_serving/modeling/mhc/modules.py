"""Modules with the parameters of hyper-connections, under the names of the checkpoints' own implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tk_serving.modeling.mhc import ops
from tk_serving.modeling.mhc.functions import mhc_head, mhc_pre

MULT = 4
MIXES = MULT * (2 + MULT)


class HyperConnection(nn.Module):
    """A sublayer between the mixes of its residual streams: ``streams = connection(streams, sublayer)``.

    Starts as an ordinary residual connection: with fn zero, the input is the mean of the streams, the output goes to
    all of them in equal measure, and each keeps itself.

    Args:
        hidden_size: H, a multiple of 64.
        norm_eps: added to the mean square of the streams.
        hc_eps: eps of the pre gates and of Sinkhorn.
        sinkhorn_iters: iterations of Sinkhorn.
        post_mult: factor of the post gates.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        norm_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        sinkhorn_iters: int = 20,
        post_mult: float = 2.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.norm_eps, self.hc_eps = norm_eps, hc_eps
        self.sinkhorn_iters, self.post_mult = sinkhorn_iters, post_mult
        self.fn = nn.Parameter(torch.zeros(MIXES, MULT * hidden_size, device=device))
        self.scale = nn.Parameter(torch.ones(3, device=device))
        base = torch.zeros(MIXES, device=device)
        base[:MULT] = -1.0986123  # sigma gives 1/4
        base[2 * MULT :] = 8.0 * torch.eye(MULT, device=device).flatten()
        self.base = nn.Parameter(base)

    def pre(self, residual: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(input of the sublayer, mixes for :meth:`post`)."""
        return mhc_pre(
            residual,
            self.fn,
            self.scale,
            self.base,
            norm_eps=self.norm_eps,
            post_mult_value=self.post_mult,
            pre_eps=self.hc_eps,
            sinkhorn_eps=self.hc_eps,
            sinkhorn_repeat=self.sinkhorn_iters,
        )

    def post(self, output: Tensor, residual: Tensor, mixes: tuple[Tensor, Tensor]) -> Tensor:
        """The streams after the sublayer."""
        return ops.mhc_post(output, residual, *mixes)

    def forward(self, residual: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        layer_input, mixes = self.pre(residual)
        return self.post(sublayer(layer_input), residual, mixes)


class HyperHead(nn.Module):
    """The residual streams as one, before the final norm. Starts as their mean."""

    def __init__(
        self,
        hidden_size: int,
        *,
        norm_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.norm_eps, self.hc_eps = norm_eps, hc_eps
        self.fn = nn.Parameter(torch.zeros(MULT, MULT * hidden_size, device=device))
        self.scale = nn.Parameter(torch.ones(1, device=device))
        self.base = nn.Parameter(torch.full((MULT,), -1.0986123, device=device))

    def forward(self, residual: Tensor) -> Tensor:
        return mhc_head(residual, self.fn, self.scale, self.base, norm_eps=self.norm_eps, pre_eps=self.hc_eps)
