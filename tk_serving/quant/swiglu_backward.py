"""Gradients of SwiGLU."""

from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import Close, Steps
from tk_serving.expect import Expect
from tk_serving.operator import Out, Plan, operator
from tk_serving.quant import gradients
from tk_serving.quant.gating import Rows
from tk_serving.quant.swiglu_backward_and_per_token_cast import fine_tuning
from tk_serving.workloads import Maker, serving

NAMES = {"row_weights": "topk_weights", "psum": "psum_num_tokens_per_expert", "clamp": "clamp_value"}

_expect = Expect("swiglu_backward")


def check(expect: Expect, x: Tensor, grad_out: Tensor, rows: Rows, factor: int) -> tuple[int, int]:
    """Check plain operands, H a multiple of ``factor``; (N, H)."""
    n, hidden = rows.check(expect, x, factor, NAMES)
    expect.tensor("grad_out", grad_out, (torch.bfloat16, torch.float32), (n, hidden))
    expect.same_device(x=x, grad_out=grad_out)
    return n, hidden


def _plan(
    x: Tensor,
    grad_out: Tensor,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    do_recompute: bool,
) -> Plan:
    rows = rows_of(psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value)
    n, hidden = check(_expect, x, grad_out, rows, 8)
    weighted = topk_weights is not None

    def results(outputs):
        x_grad, weight_grad, out = outputs
        return out, x_grad, None, None, weight_grad

    launch = gradients.launch(
        x, grad_out, rows, results, out=x.dtype if do_recompute else None, x_grad=x.dtype, weight_grad=weighted
    )
    outputs = (
        Out((n, 2 * hidden), x.dtype),
        Out((n,), torch.float32) if weighted else None,
        Out((n, hidden), x.dtype) if do_recompute else None,
    )
    return Plan(outputs, (launch,) if n else (), refusal=gradients.refusal(hidden))


def rows_of(psum: Tensor | None, weights: Tensor | None, factor: float | None, clamp: float | None) -> Rows:
    return Rows(psum=psum, row_weights=weights, factor=factor, clamp=clamp)


def _finish(results, *args):
    return results[0], results[1] if args[3] is not None else None, results[2] if args[6] else None


def _inputs(make: Maker, *, do_recompute: bool = False, **operands: Any) -> tuple:
    return *inputs(make, **operands), do_recompute


def inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    dtype: str = "bfloat16",
    psum: tuple[int, ...] = (),
    weighted: bool = True,
    factor: float | None = None,
    clamp: float | None = None,
) -> tuple:
    """(x, grad_out, psum, weights, factor, clamp)."""
    x = make.randn(tokens, 2 * hidden, dtype=getattr(torch, dtype), scale=2.0)
    if dtype == "float32":
        x = x.abs()  # the gradient of a negative gate cancels, which multiplies the difference between two exp
    grad_out = make.randn(tokens, hidden, dtype=torch.bfloat16)
    intervals = make.value(torch.tensor(psum, dtype=torch.int32)) if psum else None
    return x, grad_out, intervals, make.rand(tokens) if weighted else None, factor, clamp


@operator(
    spec="operators.md A10",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(Steps(), Close(1e-4, 1e-4), Steps()),
    finish=_finish,
    cases=[
        {"tokens": 0, "hidden": 64, "do_recompute": True},
        {"tokens": 4, "hidden": 552, "dtype": "float32", "factor": 2.5, "weighted": False, "do_recompute": True},
        {"tokens": 150, "hidden": 72, "psum": (3, 131, 131), "factor": 1.5, "clamp": 0.5, "do_recompute": True},
        {"tokens": 3, "hidden": 520},
    ],
    workloads=fine_tuning(serving(lambda m: {"hidden": m.moe_intermediate_size, "clamp": m.swiglu_limit})),
    peers=["tile_kernels"],
)
def swiglu_backward(
    x: Tensor,
    grad_out: Tensor,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``swiglu_forward`` by x and by the weights of the rows.

    In float32, with the formulas of ``swiglu_backward_and_per_token_cast``.

    Args:
        x: bfloat16 or float32 [N, 2 H], contiguous, H a multiple of 8 up to 16384.
        grad_out: bfloat16 or float32 [N, H].
        psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value: as in ``swiglu_forward``.
        do_recompute: return the activation as well.

    Returns:
        (x_grad like x, gradient of ``topk_weights`` float32 [N] or None, result of the forward pass in the dtype of x
        or None). Padding rows are 0.

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or combination of arguments.
    """
    rows = rows_of(psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value)
    out, gradient, totals, _ = gradients.differentiate(x.float(), grad_out, rows)
    weight_grad = None if topk_weights is None else totals
    return gradient.to(x.dtype), weight_grad, out.to(x.dtype) if do_recompute else None
