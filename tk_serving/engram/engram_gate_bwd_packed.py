"""Gradients of the Engram gate where keys and value share one buffer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving import config
from tk_serving.compare import Diff
from tk_serving.engram._shapes import check_backward, split_packed
from tk_serving.engram.engram_gate_bwd import LIMIT, arguments, engram_gate_bwd
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, Workload

_expect = Expect("engram_gate_bwd_packed")


def _plan(
    grad_out: Tensor,
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None,
) -> Plan:
    _expect.that(kv.dim() == 3 and kv.shape[1] > 1, "kv", "shape [T, h + 1, D]", list(kv.shape))
    saved = (dot, gate_score, rstd_x, rstd_k)
    tokens, streams, hidden = check_backward(
        _expect, grad_out, hidden_states, *split_packed(kv), weight_fused, saved, clamp_value, image_token_mask
    )
    outputs = (
        Out((tokens, streams, hidden), torch.bfloat16),
        Out((tokens, streams + 1, hidden), torch.bfloat16),
        Out((config.get_num_sms(), streams, hidden), torch.float32),
    )
    wide = aligned(grad_out, hidden_states, kv, weight_fused)
    kernel = Launch("engram.engram_gate_bwd", {"hidden": hidden, "streams": streams, "wide": wide}, _arguments)
    return Plan(outputs, (kernel,) if tokens else (), (Out((tokens,), torch.uint8),))


def _arguments(
    buffers: Sequence[Tensor], grad_out: Tensor, hidden_states: Tensor, kv: Tensor, weight_fused: Tensor, *rest: Any
) -> tuple:
    grad_x, grad_kv, grad_w, no_mask = buffers
    unpacked = (grad_x, *split_packed(grad_kv), grad_w, no_mask)
    return arguments(unpacked, grad_out, hidden_states, *split_packed(kv), weight_fused, *rest)


def _inputs(make: Maker, **params: Any) -> tuple:
    grad_out, x, k, v, *rest = engram_gate_bwd.operator.inputs(make, **params)
    return grad_out, x, torch.cat((k, v[:, None]), dim=1), *rest


@operator(
    spec="operators.md A12",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=Diff(LIMIT),
    cases=[
        {"tokens": 0, "hidden": 256},
        {"tokens": 5, "hidden": 1024},
        {"tokens": 9, "hidden": 1280, "streams": 3, "images": True},
    ],
    workloads=[Workload("v4.1-fine-tuning", {"hidden": 5120}, (4096, 8192), "v4.1")],
)
def engram_gate_bwd_packed(
    grad_out: Tensor,
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    *,
    image_token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``engram_gate_bwd`` with keys and value in one buffer, and their gradients in one.

    Args:
        kv: bfloat16 [T, h + 1, D], stride(-1) == 1: streams 0 ... h - 1 are the keys, stream h is the value.
        others: as ``engram_gate_bwd``.

    Returns:
        (grad_x bfloat16 [T, h, D], grad_kv bfloat16 [T, h + 1, D], grad_w_partial float32 [P, h, D]).

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout, device, or a clamp that is not positive.
    """
    saved = (dot, gate_score, rstd_x, rstd_k)
    grad_x, grad_k, grad_v, grad_w = engram_gate_bwd.operator.reference(
        grad_out, hidden_states, *split_packed(kv), weight_fused, *saved, clamp_value, image_token_mask=image_token_mask
    )
    return grad_x, torch.cat((grad_k, grad_v[:, None]), dim=1), grad_w
