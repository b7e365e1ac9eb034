"""Sinkhorn normalisation of the combination matrices."""

import torch
from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._shapes import F32, MULT, count, lead, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("sinkhorn_normalize")


def _plan(x: Tensor, repeat: int, eps: float, out: Tensor | None) -> Plan:
    tokens = lead(_expect, "x", x, F32, MULT, MULT)
    _expect.at_least("repeat", repeat, 1)
    launch = Launch(
        "mhc.sinkhorn", {}, lambda outs, x, repeat, eps, _: (rows(x.view(-1)), outs[0].view(-1), repeat, eps)
    )
    return Plan((result(_expect, "out", out, x.shape, F32),), (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int, repeat: int = 20, scale: float = 1.0) -> tuple:
    return make.randn(tokens, MULT, MULT, scale=scale), repeat


@operator(
    spec="operators.md P37",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=Close(1e-5, 1e-8),
    mutates=("out",),
    finish=owned(1),
    aliases=("mhc_sinkhorn_fwd",),
    cases=[
        {"tokens": 0},
        {"tokens": 13},
        {"tokens": 3, "repeat": 1},
        {"tokens": 9, "scale": 30.0},
    ],
    workloads=serving(lambda m: {} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """Nearly doubly stochastic matrices by Sinkhorn iterations.

    P = softmax of the rows + eps, divided by its column sums + eps; then ``repeat - 1`` times divided by the row sums
    + eps and by the column sums + eps. DeepSeek-V4 uses 20 iterations, not the default.

    Args:
        x: float32 [..., 4, 4], contiguous.
        repeat: column normalisations, at least 1.
        eps: added to the softmax and to every divisor.
        out: where to write; a new tensor by default.

    Returns:
        float32, shape of x.
    """
    p = torch.exp(x - x.amax(dim=-1, keepdim=True))
    p = p / p.sum(dim=-1, keepdim=True) + eps
    p = p / (p.sum(dim=-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        p = p / (p.sum(dim=-1, keepdim=True) + eps)
        p = p / (p.sum(dim=-2, keepdim=True) + eps)
    return p
