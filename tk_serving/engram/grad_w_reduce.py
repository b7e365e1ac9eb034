"""Gradients of the two weights behind the fused one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import Diff
from tk_serving.engram._shapes import check_weight, fine_tuning
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker

_expect = Expect("grad_w_reduce")


def _plan(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> Plan:
    shape = check_weight(_expect, "weight_hidden", weight_hidden, torch.bfloat16)
    _expect.tensor("weight_embed", weight_embed, torch.bfloat16, shape)
    rows, _, _ = _expect.tensor("grad_w_partial", grad_w_partial, torch.float32, ("P", *shape))
    _expect.that(rows > 0, "grad_w_partial", "at least one partial sum", list(grad_w_partial.shape))
    _expect.tensor("grad_weight_hidden", grad_weight_hidden, torch.float32, shape)
    _expect.tensor("grad_weight_embed", grad_weight_embed, torch.float32, shape)
    _expect.same_device(
        grad_w_partial=grad_w_partial,
        weight_hidden=weight_hidden,
        weight_embed=weight_embed,
        grad_weight_hidden=grad_weight_hidden,
        grad_weight_embed=grad_weight_embed,
    )
    return Plan((), (Launch("engram.grad_w_reduce", {"wide": aligned(grad_w_partial)}, _arguments),))


def _arguments(_: Sequence[Tensor], grad_w_partial: Tensor, *weights: Tensor) -> tuple:
    return grad_w_partial.flatten(1), *(w.view(-1) for w in weights)


def _traffic(grad_w_partial: Tensor, weight_hidden: Tensor, *_: Tensor) -> int:
    # Two gradients are read and written, two weights read.
    return 4 * grad_w_partial.numel() + (2 * 8 + 2 * 2) * weight_hidden.numel()


def _inputs(make: Maker, *, tokens: int, hidden: int, streams: int = 4) -> tuple:
    shape = (streams, hidden)
    weights = [make.randn(*shape, dtype=torch.bfloat16) for _ in range(2)]
    return make.randn(tokens, *shape), *weights, make.randn(*shape), make.randn(*shape)


@operator(
    spec="operators.md P33",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=Diff(1e-10),
    mutates=("grad_weight_hidden", "grad_weight_embed"),
    traffic=_traffic,
    # Here `tokens` is P, the number of partial sums.
    cases=[
        {"tokens": 1, "hidden": 256, "streams": 1},
        {"tokens": 37, "hidden": 512},
        {"tokens": 190, "hidden": 256, "streams": 3},
    ],
    workloads=fine_tuning(132),
    peers=["tile_kernels"],
)
def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Add the gradients of both weights of the Engram gate to the caller's buffers.

    With w the sum of the partial gradients in ascending order: grad_weight_hidden += w weight_embed and
    grad_weight_embed += w weight_hidden, in float32.

    Args:
        grad_w_partial: float32 [P, h, D], contiguous, P >= 1; see ``engram_gate_bwd``.
        weight_hidden, weight_embed: bfloat16 [h, D], contiguous, D a multiple of 256.
        grad_weight_hidden, grad_weight_embed: float32 [h, D], contiguous; accumulated in place.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout or device.
    """
    total = torch.zeros_like(grad_weight_hidden)
    for partial in grad_w_partial:
        total += partial
    grad_weight_hidden += total * wide(weight_embed)
    grad_weight_embed += total * wide(weight_hidden)
