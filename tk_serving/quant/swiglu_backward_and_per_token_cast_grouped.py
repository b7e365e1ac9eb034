"""Gradients of SwiGLU, quantised, of rows that are grouped by expert."""

from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import Close, Steps
from tk_serving.expect import Expect
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.plan import Out
from tk_serving.quant import casting, gradients, scales
from tk_serving.quant.formats import FORMATS
from tk_serving.quant.swiglu_backward import check, inputs, rows_of
from tk_serving.quant.swiglu_backward_and_per_token_cast import GROUPS, fine_tuning
from tk_serving.workloads import Maker, serving

_expect = Expect("swiglu_backward_and_per_token_cast_grouped")


def _plan(
    x: Tensor,
    grad_out: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    routed_scaling_factor: float | None,
    round_sf: bool,
    clamp_value: float | None,
    do_recompute: bool,
) -> Plan:
    _expect.one_of("fmt", fmt, ("e4m3",))
    _expect.one_of("num_per_channels", num_per_channels, GROUPS)
    rows = rows_of(psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value)
    n, hidden = check(_expect, x, grad_out, rows, num_per_channels)
    weighted = topk_weights is not None

    def results(outputs):
        data, sf, weight_grad, out = outputs
        return out, None, data, sf, weight_grad

    launch = gradients.launch(
        x,
        grad_out,
        rows,
        results,
        npc=num_per_channels,
        cast=True,
        round_sf=round_sf,
        out=x.dtype if do_recompute else None,
        weight_grad=weighted,
    )
    outputs = (
        casting.data_out(fmt, n, 2 * hidden),
        scales.sf_out(scales.ROW, n, 2 * hidden // num_per_channels),
        Out((n,), torch.float32) if weighted else None,
        Out((n, hidden), x.dtype) if do_recompute else None,
    )
    return Plan(outputs, (launch,) if n else (), refusal=gradients.refusal(hidden))


def _finish(results, *args):
    data, sf, weight_grad, out = results
    return (data, sf), weight_grad if args[5] is not None else None, out if args[9] else None


def _inputs(make: Maker, *, npc: int, round_sf: bool = False, do_recompute: bool = False, **operands: Any) -> tuple:
    x, grad_out, psum, weights, factor, clamp = inputs(make, **operands)
    return x, grad_out, "e4m3", npc, psum, weights, factor, round_sf, clamp, do_recompute


@operator(
    spec="operators.md A10",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(Steps(), Steps(), Close(1e-4, 1e-4), Steps()),
    finish=_finish,
    cases=[
        {"tokens": 0, "hidden": 64, "npc": 32},
        {"tokens": 132, "hidden": 160, "npc": 32, "psum": (2, 130), "factor": 1.5, "clamp": 0.5, "round_sf": True},
        {"tokens": 3, "hidden": 640, "npc": 128, "weighted": False, "do_recompute": True},
    ],
    workloads=fine_tuning(
        serving(lambda m: {"hidden": m.moe_intermediate_size, "npc": m.quant_group, "clamp": m.swiglu_limit})
    ),
)
def swiglu_backward_and_per_token_cast_grouped(
    x: Tensor,
    grad_out: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    round_sf: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[Quantized, Tensor | None, Tensor | None]:
    """``swiglu_backward`` with a quantised gradient of x.

    Args:
        x, grad_out, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value, do_recompute: as in
            ``swiglu_backward``.
        fmt: ``e4m3``.
        num_per_channels: columns of a group: 32 or 128, a divisor of H.
        round_sf: scales are powers of two.

    Returns:
        ((float8_e4m3fn [N, 2 H], float32 [N, 2 H / npc]), gradient of ``topk_weights`` float32 [N] or None, activation
        in the dtype of x or None). Data and scales of padding rows are 0.

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, group size or combination of arguments.
    """
    rows = rows_of(psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value)
    out, gradient, totals, live = gradients.differentiate(x.float(), grad_out, rows)
    sf, inverse = scales.rule(casting.amax_of(gradient, None, 1, num_per_channels), FORMATS[fmt], round_sf)
    data = casting.quantize(gradient, None, inverse, fmt, 1, num_per_channels)
    weight_grad = None if topk_weights is None else totals
    return (data, torch.where(live[:, None], sf, 0.0)), weight_grad, out.to(x.dtype) if do_recompute else None
