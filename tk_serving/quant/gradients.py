"""What the gradients of SwiGLU share: their launch, their values in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving import config
from tk_serving.arithmetic import fma
from tk_serving.expect import short
from tk_serving.layout import aligned
from tk_serving.operator import Quantized
from tk_serving.plan import Launch
from tk_serving.quant import sums
from tk_serving.quant.gating import Rows, owned

LARGEST_HIDDEN = sums.TILE * sums.WARPS


def refusal(hidden: int) -> str | None:
    return f"more than {LARGEST_HIDDEN} columns of a gate" if hidden > LARGEST_HIDDEN else None


def launch(
    x: Tensor | Quantized,
    grad_out: Tensor,
    rows: Rows,
    results: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    *,
    npc: int = 0,
    cast: bool = False,
    round_sf: bool = False,
    out: torch.dtype | None = None,
    x_grad: torch.dtype | None = None,
    weight_grad: bool = False,
) -> Launch:
    """The kernel of the gradients; ``results(outputs)``: (activation, x_grad, data, sf, weight gradients)."""
    data = x if isinstance(x, Tensor) else x[0]
    config_ = {
        "x": short(x.dtype) if isinstance(x, Tensor) else "e4m3",
        "npc": npc,
        "cast": cast,
        "grad": short(grad_out.dtype),
        **{name: value for name, value in rows.config.items() if name != "counters"},
        "out": short(out) if out else None,
        "x_grad": short(x_grad) if x_grad else None,
        "weight_grad": weight_grad,
        "round_sf": round_sf,
        "warps": sums.warps(data.shape[1] // 2),
        "aligned": aligned(data, grad_out),
    }
    weights = rows.row_weights if rows.topk_weights is None else rows.topk_weights
    numbers = (
        float(rows.clamp or 0.0),
        1.0 if rows.factor is None else float(rows.factor),
        config.get_token_alignment(),
    )

    def arguments(
        outputs: Sequence[Tensor | None], x: Tensor | Quantized, grad_out: Tensor, *_: object
    ) -> Sequence[Any]:
        values = (x, None) if isinstance(x, Tensor) else x
        return (*values, grad_out, rows.positions, weights, rows.psum, *results(outputs), *numbers)

    return Launch("quant.swiglu_backward", config_, arguments)


# -- the reference --------------------------------------------------------------------------------------------


def differentiate(values: Tensor, grad_out: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(activation times weight [N, H], gradient [N, 2 H], gradient of the weight of each row [N], rows with a token or
    an expert [N]) in float32; zeros in other rows. ``values`` is float32 [N, 2 H]."""
    n, width = values.shape
    live = torch.ones(n, dtype=torch.bool, device=values.device)
    weight = torch.ones(n, device=values.device)
    inner = None
    if rows.topk_weights is not None and rows.positions is not None:
        flat = rows.topk_weights.flatten()
        live = (rows.positions >= 0) & (rows.positions < flat.shape[0])
        if flat.numel():
            weight = flat[torch.where(live, rows.positions, 0).long()]
    else:
        if rows.row_weights is not None:
            weight = rows.row_weights
        if rows.factor is not None:
            inner = torch.tensor(rows.factor, dtype=torch.float32, device=values.device)
            weight = weight * inner
        if rows.psum is not None:
            live = owned(rows.psum, n)
    weight = weight[:, None]
    gate, up = values[:, : width // 2], values[:, width // 2 :]
    a, b = gate, up
    if rows.clamp is not None:
        limit = torch.tensor(rows.clamp, dtype=torch.float32, device=values.device)
        a = torch.where(gate > limit, limit, gate)
        b = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    t = 1.0 + torch.exp(-a)
    s = torch.ones_like(t) / t
    act = a / t * b
    go = grad_out.float()
    q = go * weight * s
    da = q * b * fma(a, 1.0 - s, torch.ones_like(a))
    db = q * a
    if rows.clamp is not None:
        da = torch.where(gate > limit, 0.0, da)
        db = torch.where((up > limit) | (up < -limit), 0.0, db)
    total = sums.row_sum(go * act)
    if inner is not None:
        total = total * inner
    kept = live[:, None]
    gradient = torch.where(kept, torch.cat((da, db), dim=1), 0.0)
    return torch.where(kept, act * weight, 0.0), gradient, torch.where(live, total, 0.0), live
