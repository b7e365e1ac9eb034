"""Gradients of the quantised SwiGLU between the two matrix products of an expert, quantised for the first."""

import torch
from torch import Tensor

from tk_serving.compare import Close, Steps
from tk_serving.expect import Expect
from tk_serving.operator import Launch, Out, Plan, Quantized, operator
from tk_serving.quant import casting, gradients, samples, scales
from tk_serving.quant.formats import FORMATS
from tk_serving.quant.gating import Rows
from tk_serving.workloads import Maker, Model, Workload, serving

GROUPS = (32, 128)

_expect = Expect("swiglu_backward_and_per_token_cast")


def _plan(
    x: Quantized,
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
) -> Plan:
    data, sf = x
    n, width = _expect.tensor("x[0]", data, torch.float8_e4m3fn, ("N", "2 H"), contiguous=False)
    _expect.one_of("num_per_channels", num_per_channels, GROUPS)
    ok = width > 0 and width % (2 * num_per_channels) == 0
    _expect.that(ok, "x[0]", f"2 H columns, H a positive multiple of num_per_channels = {num_per_channels}", width)
    hidden, blocks = width // 2, width // num_per_channels
    _expect.dtype("x[1]", sf, torch.float32)
    _expect.shape("x[1]", sf, (n, blocks))
    _expect.tensor("grad_out", grad_out, torch.bfloat16, (n, hidden))
    tokens, topk = _expect.tensor("weight", weight, torch.float32, ("T", "K"))
    _expect.tensor("pos_to_token_topk", pos_to_token_topk, torch.int32, (n,))
    _expect.tensor("token_topk_to_pos", token_topk_to_pos, torch.int32, (tokens, topk))
    if swiglu_clamp_value is not None:
        _expect.positive("swiglu_clamp_value", swiglu_clamp_value)
    _expect.same_device(
        **{"x[0]": data, "x[1]": sf},
        grad_out=grad_out,
        weight=weight,
        pos_to_token_topk=pos_to_token_topk,
        token_topk_to_pos=token_topk_to_pos,
    )

    def results(buffers):
        out, data, sf, x_grad, _, totals = buffers
        return out, x_grad, data, sf, totals

    main = gradients.launch(
        x,
        grad_out,
        Rows(positions=pos_to_token_topk, topk_weights=weight, clamp=swiglu_clamp_value),
        results,
        npc=num_per_channels,
        cast=True,
        round_sf=round_sf,
        out=torch.bfloat16,
        x_grad=torch.bfloat16,
        weight_grad=True,
    )
    gather = Launch("quant.swiglu_backward:gather", {}, lambda buffers, *args: (buffers[5], args[4], buffers[4]))
    outputs = (
        Out((n, hidden), torch.bfloat16),
        casting.data_out("e4m3", n, width),
        scales.sf_out(scales.ROW, n, blocks),
        Out((n, width), torch.bfloat16),
        Out((tokens, topk), torch.float32),
    )
    launches = ((main, gather) if weight.numel() else (main,)) if n else ()
    return Plan(outputs, launches, (Out((n,), torch.float32),), refusal=gradients.refusal(hidden))


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    npc: int,
    topk: int = 2,
    round_sf: bool = False,
    clamp: float | None = None,
    values: str = "normal",
) -> tuple:
    n = tokens * topk + 3 if tokens else 0
    x = samples.quantized(make, n, 2 * hidden, "e4m3", (1, npc))
    # Codes and scales of ordinary magnitude: gates around 1.
    x = x[0], make.rand(n, 2 * hidden // npc) * 0.03
    positions = torch.full((n,), -1, dtype=torch.int32)
    slots = torch.arange(tokens * topk, dtype=torch.int32).view(tokens, topk)
    positions[: tokens * topk] = slots.flatten().flip(0)
    slots = slots.flip(0, 1).clone()
    if values == "special" and tokens > 2:
        slots[0, 0], slots[1, 1] = -1, n + 5
        positions[2], positions[3] = -7, tokens * topk
    grad_out = make.randn(n, hidden, dtype=torch.bfloat16)
    weight = make.rand(tokens, topk)
    return x, grad_out, weight, make.value(positions), make.value(slots), npc, round_sf, clamp


def _training(model: Model) -> dict[str, object]:
    return {
        "hidden": model.moe_intermediate_size,
        "npc": model.quant_group,
        "topk": model.num_experts_per_tok,
        "round_sf": model.quant_group == 32,
        "clamp": model.swiglu_limit,
    }


def fine_tuning(workloads: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """Those with many tokens."""
    return tuple(w for w in workloads if min(w.tokens) > 64)


@operator(
    spec="operators.md P15",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(Steps(), Steps(), Steps(), Steps(), Close(1e-4, 1e-4)),
    cases=[
        {"tokens": 0, "hidden": 256, "npc": 128},
        {"tokens": 3, "hidden": 640, "npc": 128, "values": "special"},
        {"tokens": 3, "hidden": 544, "npc": 32, "round_sf": True, "clamp": 0.7, "values": "special"},
    ],
    workloads=fine_tuning(serving(_training)),
    peers=["tile_kernels"],
)
def swiglu_backward_and_per_token_cast(
    x: Quantized,
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[Tensor, Quantized, Tensor, Tensor]:
    """Gradients of y = weight * silu(gate) * up by x, plain and quantised, and by the weight; y itself once more.

    In float32, with a and b the clamped halves, t = 1 + exp(-a), s = 1 / t, act = (a / t) * b and
    q = (grad_out * weight) * s: the gradient of the gate is (q * b) * fma(a, 1 - s, 1), that of the up half q * a; 0
    where the clamp was active.

    Args:
        x: float8_e4m3fn [N, 2 H], row-strided, and float32 [N, 2 H / npc]: what the forward pass saw.
        grad_out: bfloat16 [N, H].
        weight: float32 [T, K].
        pos_to_token_topk: int32 [N], index into the flat ``weight``; out of range gives rows of zeros.
        token_topk_to_pos: int32 [T, K]: the row of a weight; out of range gives a weight gradient of 0.
        num_per_channels: columns of a group: 32 or 128, a divisor of H.
        round_sf: scales of the gradient are powers of two.
        swiglu_clamp_value: gate at most c, up in [-c, c].

    Returns:
        (y bfloat16 [N, H], (float8_e4m3fn [N, 2 H], float32 [N, 2 H / npc]), x_grad bfloat16 [N, 2 H],
        weight_grad float32 [T, K]).

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout or group size.
    """
    rows = Rows(positions=pos_to_token_topk, topk_weights=weight, clamp=swiglu_clamp_value)
    out, gradient, totals, _ = gradients.differentiate(casting.dequantised(x, (1, num_per_channels)), grad_out, rows)
    sf, inverse = scales.rule(casting.amax_of(gradient, None, 1, num_per_channels), FORMATS["e4m3"], round_sf)
    data = casting.quantize(gradient, None, inverse, "e4m3", 1, num_per_channels)
    known = (token_topk_to_pos >= 0) & (token_topk_to_pos < len(totals))
    weight_grad = torch.zeros_like(weight)
    if len(totals):
        weight_grad = torch.where(known, totals[torch.where(known, token_topk_to_pos, 0).long()], 0.0)
    return out.to(torch.bfloat16), (data, sf), gradient.to(torch.bfloat16), weight_grad
