"""What the operators that make a sublayer's input share: checks, the second launch, the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_serving.expect import Expect, short
from tk_serving.mhc._shapes import F32, MIXES, MULT, rows
from tk_serving.operator import Launch, Out

GATHERED, GIVEN = "gathered", "given"
"""Source of the input: the streams and the pre mixes, or a tensor that holds it already."""


def check_gates(expect: Expect, scale: Tensor, base: Tensor, sinkhorn_repeat: int) -> None:
    expect.tensor("mhc_scale", scale, F32, (3,))
    expect.tensor("mhc_base", base, F32, (MIXES,))
    expect.at_least("sinkhorn_repeat", sinkhorn_repeat, 1)


def mix_outputs(lead: Sequence[int]) -> tuple[Out, Out]:
    """Post and combination mixes."""
    return Out((*lead, MULT, 1), F32), Out((*lead, MULT, MULT), F32)


@dataclass(slots=True)
class Values:
    """Numbers of one call, as the kernel takes them."""

    rms_eps: float
    pre_eps: float
    sinkhorn_eps: float = 0.0
    post_mult: float = 0.0
    repeat: int = 1
    norm_eps: float = 0.0


@dataclass(slots=True)
class Tensors:
    """Tensors of one call; absent ones are None."""

    mul: Tensor
    sqr: Tensor
    scale: Tensor
    base: Tensor
    x: Tensor
    norm_weight: Tensor | None = None
    pre: Tensor | None = None
    post: Tensor | None = None
    comb: Tensor | None = None
    out: Tensor | None = None
    data: Tensor | None = None
    sf: Tensor | None = None


def finish(
    size: int,
    splits: int,
    values: Values,
    tensors: Callable[..., Tensors],
    *,
    mixes: int = MIXES,
    source: str = GATHERED,
    with_pre: bool = False,
    norm_weight: Tensor | None = None,
    rms_before_rounding: bool = False,
    store: bool = True,
    fmt: str = "",
    npc: int = 128,
    layout: str = "row",
    round_sf: bool = False,
    pdl: bool = True,
    trigger_last: bool = False,
) -> Launch:
    """The launch that turns the parts into mixes and the sublayer's input.

    ``tensors(outs, *args)`` names the tensors of the call. The flags are those of ``kernels/pre.py``.
    """
    config = {
        "hidden": size,
        "mixes": mixes,
        "splits": splits,
        "source": source,
        "with_pre": with_pre,
        "norm": "" if norm_weight is None else short(norm_weight.dtype),
        "rms_before_rounding": rms_before_rounding,
        "store": store,
        "fmt": fmt,
        "npc": npc,
        "layout": layout,
        "round_sf": round_sf,
    }
    streams = MULT if source == GATHERED else 1

    def arguments(outs: Sequence[Tensor], *args: Any) -> tuple:
        t = tensors(outs, *args)
        scale, base = rows(t.scale), rows(t.base)
        x = rows(t.x, streams, size)
        tokens = x.shape[0]
        # Any tensor of the right type stands for one that is absent.
        mix, wide = base[:MULT].view(1, MULT), x[:1, 0]
        padded = t.sf.stride(1) if t.sf is not None and layout != "row" else tokens
        return (
            t.mul,
            t.sqr,
            scale,
            base,
            x,
            scale[:1] if t.norm_weight is None else rows(t.norm_weight),
            mix if t.pre is None else t.pre.view(-1, MULT),
            mix if t.post is None else t.post.view(-1, MULT),
            mix.expand(MULT, MULT).reshape(1, -1) if t.comb is None else t.comb.view(-1, MULT * MULT),
            wide if t.out is None else t.out.view(-1, size),
            wide if t.data is None else t.data,
            scale[:1] if t.sf is None else t.sf,
            padded,
            float(MULT * size),
            values.rms_eps,
            values.pre_eps,
            values.sinkhorn_eps,
            values.post_mult,
            values.norm_eps,
            values.repeat,
        )

    return Launch("mhc.pre", config, arguments, pdl=pdl, trigger_last=trigger_last)


def refuse_autograd(operator: str, *tensors: Tensor | None) -> None:
    """RuntimeError where the caller expects gradients that the operator does not give."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(f"{operator}: forward only: no gradients; call the differentiable functions one by one")
