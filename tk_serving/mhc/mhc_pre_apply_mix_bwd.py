"""Gradients of the weighted sum of the residual streams."""

import torch
from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import BITWISE, Close
from tk_serving.expect import Expect
from tk_serving.mhc._shapes import BF16, F32, MULT, count, hidden, lead, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_apply_mix_bwd")


def _plan(grad_out: Tensor, x: Tensor, mix: Tensor, x_grad: Tensor | None, mix_grad: Tensor | None) -> Plan:
    size = hidden(_expect, "grad_out", grad_out)
    tokens = lead(_expect, "grad_out", grad_out, BF16, "H")
    lead(_expect, "x", x, BF16, MULT, size, like=tokens)
    lead(_expect, "mix", mix, F32, MULT, 1, like=tokens)
    _expect.same_device(grad_out=grad_out, x=x, mix=mix, x_grad=x_grad, mix_grad=mix_grad)
    slots = (
        result(_expect, "x_grad", x_grad, x.shape, BF16),
        result(_expect, "mix_grad", mix_grad, mix.shape, F32),
    )
    launch = Launch(
        "mhc.apply_mix:backward",
        {"hidden": size},
        lambda outs, grad, x, mix, *_: (
            rows(grad, size),
            rows(x, MULT, size),
            rows(mix, MULT),
            outs[0].view(-1, MULT, size),
            outs[1].view(-1, MULT),
        ),
    )
    return Plan(slots, (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int, hidden: int) -> tuple:
    return (
        make.randn(tokens, hidden, dtype=BF16),
        make.randn(tokens, MULT, hidden, dtype=BF16),
        make.rand(tokens, MULT, 1),
    )


@operator(
    spec="operators.md P38, A11",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(BITWISE, Close(1e-5, 1e-3)) * 2,  # as results, and in the caller's tensors
    mutates=("x_grad", "mix_grad"),
    finish=owned(2),
    cases=[{"tokens": 0, "hidden": 128}, {"tokens": 3, "hidden": 192}, {"tokens": 2, "hidden": 1280}],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
)
def mhc_pre_apply_mix_bwd(
    grad_out: Tensor, x: Tensor, mix: Tensor, *, x_grad: Tensor | None = None, mix_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`mhc_pre_apply_mix`.

    Args:
        grad_out: bfloat16 [..., H], contiguous.
        x: bfloat16 [..., 4, H], contiguous: the input of the forward pass.
        mix: float32 [..., 4, 1], contiguous.
        x_grad, mix_grad: where to write; new tensors by default.

    Returns:
        Gradients of x (mix times grad_out, rounded once) and of mix (float32 sums over H).
    """
    grad = wide(grad_out).unsqueeze(-2)
    return (mix * grad).to(x.dtype), torch.sum(grad * wide(x), dim=-1, keepdim=True)
