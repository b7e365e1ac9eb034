"""PyTorch's own operators, where one of them computes what an operator of ours computes."""

from __future__ import annotations

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, covers


def topk_gate(scores: Tensor, num_topk: int) -> PeerCall:
    """``torch.topk``: any order among equal scores."""
    return PeerCall(lambda: scores.topk(num_topk, dim=1).indices, note="any order among equal scores")


def group_count(group_idx: Tensor, num_groups: int) -> PeerCall:
    """``torch.histc`` of the ids: the one histogram of torch that does not synchronise."""
    counts = torch.zeros(num_groups + 1, dtype=torch.int32, device=group_idx.device)
    one = torch.ones((), dtype=torch.int32, device=group_idx.device).expand(group_idx.numel())
    flat = group_idx.reshape(-1)

    def run() -> Tensor:
        index = torch.where((flat >= 0) & (flat < num_groups), flat, num_groups)
        return counts.zero_().scatter_add_(0, index, one)

    return PeerCall(run, lambda result: result[:num_groups])


def norm_forward(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None, **rest: object
) -> PeerCall:
    """``torch.nn.functional.rms_norm``."""
    covers(residual is None, "calls without residual")
    covers(rest.get("out_scale", 1.0) == 1.0 and not rest.get("with_rstd"), "out_scale 1 without rstd")
    return PeerCall(lambda: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps), lambda out: (out, None, x))
