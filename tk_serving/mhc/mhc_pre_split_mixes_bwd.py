"""Gradients of the gates of a sublayer's mixes."""

import torch
from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._gates import plan_backward
from tk_serving.mhc._math import column_scale, sigmoid
from tk_serving.mhc._shapes import F32, MIXES, MULT, lead, owned
from tk_serving.operator import Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_split_mixes_bwd")


def _plan(
    pre_grad: Tensor,
    post_grad: Tensor,
    comb_grad: Tensor,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_post_mult_value: float,
    input_mixes_grad: Tensor | None,
    mhc_scale_grad: Tensor | None,
    mhc_base_grad: Tensor | None,
) -> Plan:
    owned_grads = (input_mixes_grad, mhc_scale_grad, mhc_base_grad)
    plan = plan_backward(
        _expect, MIXES, input_mixes, mhc_scale, mhc_base, owned_grads, mhc_post_mult_value, "input_mixes"
    )
    tokens = input_mixes.shape[:-1]
    lead(_expect, "pre_grad", pre_grad, F32, MULT, 1, like=tokens)
    lead(_expect, "post_grad", post_grad, F32, MULT, 1, like=tokens)
    lead(_expect, "comb_grad", comb_grad, F32, MULT, MULT, like=tokens)
    _expect.same_device(
        pre_grad=pre_grad,
        post_grad=post_grad,
        comb_grad=comb_grad,
        input_mixes=input_mixes,
        mhc_scale=mhc_scale,
        mhc_base=mhc_base,
    )
    return plan


def _inputs(make: Maker, *, tokens: int) -> tuple:
    grads = make.randn(tokens, MULT, 1), make.randn(tokens, MULT, 1), make.randn(tokens, MULT, MULT)
    return *grads, make.randn(tokens, MIXES), make.randn(3), make.randn(MIXES), 2.0


@operator(
    spec="operators.md P36, A11",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(Close(1e-5, 2e-5), Close(1e-4, 1e-3), Close(1e-4, 1e-3)) * 2,  # as results, and in the caller's tensors
    mutates=("input_mixes_grad", "mhc_scale_grad", "mhc_base_grad"),
    finish=owned(3),
    cases=[{"tokens": 0}, {"tokens": 13}, {"tokens": 150}],
    workloads=serving(lambda m: {} if m.hc_mult else None),
)
def mhc_pre_split_mixes_bwd(
    pre_grad: Tensor,
    post_grad: Tensor,
    comb_grad: Tensor,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_post_mult_value: float,
    *,
    input_mixes_grad: Tensor | None = None,
    mhc_scale_grad: Tensor | None = None,
    mhc_base_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`mhc_pre_split_mixes`; those of scale and base are sums over tokens in a fixed order.

    Args:
        pre_grad, post_grad, comb_grad: float32 gradients of the three results.
        input_mixes, mhc_scale, mhc_base, mhc_post_mult_value: the arguments of the forward pass.
        input_mixes_grad, mhc_scale_grad, mhc_base_grad: where to write; new tensors by default.

    Returns:
        float32 gradients of input_mixes, mhc_scale and mhc_base.
    """
    scale = column_scale(mhc_scale)
    gate = sigmoid(input_mixes * scale + mhc_base)[..., : 2 * MULT]
    slope = gate * (1.0 - gate)
    pre = pre_grad.squeeze(-1) * slope[..., :MULT]
    post = post_grad.squeeze(-1) * mhc_post_mult_value * slope[..., MULT:]
    grad = torch.cat([pre, post, comb_grad.flatten(-2)], dim=-1)
    of_scale = (grad * input_mixes).reshape(-1, MIXES).sum(dim=0)
    groups = of_scale.split([MULT, MULT, MULT * MULT])
    return grad * scale, torch.stack([group.sum() for group in groups]), grad.reshape(-1, MIXES).sum(dim=0)
