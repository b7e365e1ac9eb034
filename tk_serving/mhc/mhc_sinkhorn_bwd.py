"""Gradient of the Sinkhorn normalisation."""

import torch
from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._shapes import F32, MULT, count, lead, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_sinkhorn_bwd")
_MAX_REPEAT = 200


def _plan(grad_out: Tensor, x: Tensor, repeat: int, eps: float, x_grad: Tensor | None) -> Plan:
    tokens = lead(_expect, "x", x, F32, MULT, MULT)
    lead(_expect, "grad_out", grad_out, F32, MULT, MULT, like=tokens)
    _expect.same_device(grad_out=grad_out, x=x, x_grad=x_grad)
    _expect.at_least("repeat", repeat, 1)
    launch = Launch(
        "mhc.sinkhorn:backward",
        {"repeat": repeat},
        lambda outs, grad, x, _, eps, __: (rows(grad.view(-1)), rows(x.view(-1)), outs[0].view(-1), eps),
    )
    slot = result(_expect, "x_grad", x_grad, x.shape, F32)
    refusal = f"more than {_MAX_REPEAT} iterations" if repeat > _MAX_REPEAT else None
    return Plan((slot,), (launch,) if count(tokens) and not refusal else (), refusal=refusal)


def _inputs(make: Maker, *, tokens: int, repeat: int = 20) -> tuple:
    return make.randn(tokens, MULT, MULT), make.randn(tokens, MULT, MULT), repeat


@operator(
    spec="operators.md P37, A11",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=Close(1e-5, 1e-6),
    mutates=("x_grad",),
    finish=owned(1),
    cases=[{"tokens": 0}, {"tokens": 9}, {"tokens": 3, "repeat": 1}],
    workloads=serving(lambda m: {} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_sinkhorn_bwd(
    grad_out: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6, *, x_grad: Tensor | None = None
) -> Tensor:
    """Gradient of :func:`sinkhorn_normalize`, exact through all its steps; eps is a constant.

    Args:
        grad_out: float32 [..., 4, 4], contiguous.
        x, repeat, eps: the arguments of the forward pass; its iterates are computed again.
        x_grad: where to write; a new tensor by default.

    Returns:
        float32, shape of x.
    """
    start = torch.exp(x - x.amax(dim=-1, keepdim=True))
    start = start / start.sum(dim=-1, keepdim=True)
    p, steps = start + eps, []
    for k in range(2 * repeat - 1):
        dim = -1 if k % 2 else -2
        divisor = p.sum(dim=dim, keepdim=True) + eps
        p = p / divisor
        steps.append((dim, p, divisor))
    grad = grad_out
    for dim, p, divisor in reversed(steps):
        grad = (grad - (grad * p).sum(dim=dim, keepdim=True)) / divisor
    return start * (grad - (grad * start).sum(dim=-1, keepdim=True))
