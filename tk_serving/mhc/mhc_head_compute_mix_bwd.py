"""Gradients of the output head's gate."""

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._gates import plan_backward
from tk_serving.mhc._math import sigmoid
from tk_serving.mhc._shapes import F32, MULT, lead, owned
from tk_serving.operator import Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_head_compute_mix_bwd")


def _plan(
    grad_out: Tensor,
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mix_grad: Tensor | None,
    mhc_scale_grad: Tensor | None,
    mhc_base_grad: Tensor | None,
) -> Plan:
    owned_grads = (input_mix_grad, mhc_scale_grad, mhc_base_grad)
    plan = plan_backward(_expect, MULT, input_mix, mhc_scale, mhc_base, owned_grads, 1.0, "input_mix")
    lead(_expect, "grad_out", grad_out, F32, MULT, like=input_mix.shape[:-1])
    _expect.same_device(grad_out=grad_out, input_mix=input_mix, mhc_scale=mhc_scale, mhc_base=mhc_base)
    return plan


def _inputs(make: Maker, *, tokens: int) -> tuple:
    return make.randn(tokens, MULT), make.randn(tokens, MULT), make.randn(1), make.randn(MULT)


@operator(
    spec="operators.md P40, A11",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(Close(1e-4, 1e-5), Close(1e-4, 1e-3), Close(1e-4, 1e-3)) * 2,  # as results, and in the caller's tensors
    mutates=("input_mix_grad", "mhc_scale_grad", "mhc_base_grad"),
    finish=owned(3),
    cases=[{"tokens": 0}, {"tokens": 70}],
    workloads=serving(lambda m: {} if m.hc_mult else None),
)
def mhc_head_compute_mix_bwd(
    grad_out: Tensor,
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    *,
    input_mix_grad: Tensor | None = None,
    mhc_scale_grad: Tensor | None = None,
    mhc_base_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`mhc_head_compute_mix`; those of scale and base are sums over tokens in a fixed order.

    Args:
        grad_out: float32 [..., 4], contiguous.
        input_mix, mhc_scale, mhc_base: the arguments of the forward pass.
        input_mix_grad, mhc_scale_grad, mhc_base_grad: where to write; new tensors by default.

    Returns:
        float32 gradients of input_mix, mhc_scale and mhc_base.
    """
    gate = sigmoid(input_mix * mhc_scale + mhc_base)
    grad = grad_out * (gate * (1.0 - gate))
    return grad * mhc_scale, (grad * input_mix).sum().reshape(1), grad.reshape(-1, MULT).sum(dim=0)
