"""Gradients of the residual update after a sublayer."""

import torch
from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import BITWISE, Close
from tk_serving.expect import Expect
from tk_serving.mhc._math import multiply_add
from tk_serving.mhc._shapes import BF16, F32, MULT, count, hidden, lead, rows
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_post_bwd")


def _plan(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, d_o: Tensor, fuse_grad_acc: bool
) -> Plan:
    size = hidden(_expect, "x", x)
    tokens = lead(_expect, "x", x, BF16, "H")
    lead(_expect, "residual", residual, BF16, MULT, size, like=tokens, contiguous=False)
    lead(_expect, "post_layer_mix", post_layer_mix, F32, MULT, 1, like=tokens)
    lead(_expect, "comb_res_mix", comb_res_mix, F32, MULT, MULT, like=tokens)
    lead(_expect, "d_o", d_o, BF16, MULT, size, like=tokens)
    _expect.same_device(x=x, residual=residual, post_layer_mix=post_layer_mix, comb_res_mix=comb_res_mix, d_o=d_o)
    outputs = (
        Out(tuple(x.shape), BF16),
        Out(tuple(residual.shape), BF16),
        Out(tuple(post_layer_mix.shape), F32),
        Out(tuple(comb_res_mix.shape), F32),
    )
    launch = Launch(
        "mhc.post:backward",
        {"hidden": size},
        lambda outs, x, residual, post, comb, grad, _: (
            rows(x, size),
            rows(residual, MULT, size),
            rows(post, MULT),
            rows(comb, MULT * MULT),
            rows(grad, MULT, size),
            outs[0].view(-1, size),
            outs[1].view(-1, MULT, size),
            outs[2].view(-1, MULT),
            outs[3].view(-1, MULT * MULT),
        ),
        pdl=False,  # its loads have to overtake its stores
    )
    return Plan(outputs, (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int, hidden: int) -> tuple:
    x, grad = make.randn(tokens, hidden, dtype=BF16), make.randn(tokens, MULT, hidden, dtype=BF16)
    residual = make.randn(tokens, MULT, hidden, dtype=BF16)
    return x, residual, make.rand(tokens, MULT, 1), make.rand(tokens, MULT, MULT), grad


@operator(
    spec="operators.md P39",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(BITWISE, BITWISE, Close(1e-5, 1e-3), Close(1e-5, 1e-3)),
    cases=[{"tokens": 0, "hidden": 128}, {"tokens": 3, "hidden": 192}, {"tokens": 2, "hidden": 2048}],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_post_bwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    d_o: Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`mhc_post`.

    Args:
        x, residual, post_layer_mix, comb_res_mix: the inputs of the forward pass.
        d_o: bfloat16 [..., 4, H], contiguous: the gradient of its result.
        fuse_grad_acc: accepted and without effect: the residual's gradient is always returned.

    Returns:
        Gradients of x and residual (bfloat16, fused multiply-adds over the ascending output stream, rounded once)
        and of the two mixes (float32 sums over H).
    """
    grad, streams = wide(d_o), wide(residual)
    x_grad = torch.zeros_like(wide(x))
    for o in range(MULT):
        x_grad = multiply_add(post_layer_mix[..., o, :], grad[..., o, :], x_grad)
    residual_grad = torch.zeros_like(streams)
    for o in range(MULT):
        residual_grad = multiply_add(comb_res_mix[..., o : o + 1], grad[..., o, :].unsqueeze(-2), residual_grad)
    post_grad = (grad * wide(x).unsqueeze(-2)).sum(dim=-1, keepdim=True)
    comb_grad = streams @ grad.transpose(-1, -2)
    return x_grad.to(x.dtype), residual_grad.to(residual.dtype), post_grad, comb_grad
