"""Gradients of the Engram gate."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving import config
from tk_serving.arithmetic import wide
from tk_serving.compare import Diff
from tk_serving.engram._shapes import check_backward, fine_tuning, split_packed
from tk_serving.engram.engram_gate_fwd import engram_gate_fwd
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker

LIMIT = 1e-8  # diff of every gradient

_expect = Expect("engram_gate_bwd")


def _plan(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None,
) -> Plan:
    saved = (dot, gate_score, rstd_x, rstd_k)
    tokens, streams, hidden = check_backward(
        _expect, grad_out, hidden_states, k, v, weight_fused, saved, clamp_value, image_token_mask
    )
    outputs = (
        Out((tokens, streams, hidden), torch.bfloat16),
        Out((tokens, streams, hidden), torch.bfloat16),
        Out((tokens, hidden), torch.bfloat16),
        Out((config.get_num_sms(), streams, hidden), torch.float32),
    )
    wide = aligned(grad_out, hidden_states, k, v, weight_fused)
    kernel = Launch("engram.engram_gate_bwd", {"hidden": hidden, "streams": streams, "wide": wide}, arguments)
    # A stand-in for an absent mask; the kernel does not read it.
    return Plan(outputs, (kernel,) if tokens else (), (Out((tokens,), torch.uint8),))


def arguments(
    buffers: Sequence[Tensor],
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None,
) -> tuple:
    """Run-time arguments of the kernel; the gradients of k and v may be views of one buffer."""
    *gradients, no_mask = buffers
    masked = image_token_mask is not None
    mask = no_mask if image_token_mask is None else image_token_mask.view(torch.uint8)
    saved = (dot, gate_score, rstd_x, rstd_k)
    return grad_out, hidden_states, k, v, weight_fused, *saved, mask, *gradients, clamp_value, int(masked)


def _inputs(
    make: Maker, *, tokens: int, hidden: int, streams: int = 4, images: bool = False, clamp: float = 1e-6
) -> tuple:
    x = make.randn(tokens, streams, hidden, dtype=torch.bfloat16)
    kv = make.randn(tokens, streams + 1, hidden, dtype=torch.bfloat16)
    k, v = split_packed(kv)
    weight = make.randn(streams, hidden, scale=0.5)
    mask = make.randint(0, 2, tokens, dtype=torch.bool) if images else None
    _, *saved = engram_gate_fwd.operator.reference(x, k, v, weight, 1e-6, clamp, image_token_mask=mask)
    if mask is not None:
        kv.masked_fill_(mask[:, None, None], torch.inf)  # must not reach any sum
    grad_out = make.randn(tokens, streams, hidden, dtype=torch.bfloat16)
    return grad_out, x, k, v, weight, *saved, clamp, mask


@operator(
    spec="operators.md P32",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=Diff(LIMIT),
    cases=[
        {"tokens": 0, "hidden": 256},
        {"tokens": 5, "hidden": 1024},
        {"tokens": 7, "hidden": 1280, "streams": 3, "images": True},
        {"tokens": 140, "hidden": 256, "streams": 2, "clamp": 0.02},
    ],
    workloads=fine_tuning(4096, 8192),
    peers=["tile_kernels"],
)
def engram_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    *,
    image_token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``engram_gate_fwd`` by hidden states, keys, values and, in partial sums, the fused weight.

    In float32 for each token and stream: delta = sum(grad_out v) g (1 - g) / 2 sqrt(rstd_x rstd_k / (sqrt(D) |dot|)),
    or 0 where the clamp was active; grad_x = grad_out + delta (k w - x dot rstd_x^2 / D),
    grad_k = delta (x w - k dot rstd_k^2 / D), grad_v = sum over streams of grad_out g, grad_w = sum over tokens of
    delta x k.

    Args:
        grad_out: bfloat16 [T, h, D], contiguous.
        hidden_states, k, v, weight_fused, clamp_value, image_token_mask: as in the forward pass.
        dot, gate_score, rstd_x, rstd_k: float32 [T, h], saved by the forward pass.

    Returns:
        (grad_x bfloat16 [T, h, D], grad_k bfloat16 [T, h, D], grad_v bfloat16 [T, D],
        grad_w_partial float32 [P, h, D] with P = ``config.get_num_sms()``, to be summed over P: see ``grad_w_reduce``).
        Where the mask is True grad_x is grad_out and the other gradients of the token are 0.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout, device, or a clamp that is not positive.
    """
    tokens, streams, width = hidden_states.shape
    go, x, key, value = wide(grad_out), wide(hidden_states), wide(k), wide(v)
    similarity = dot.abs() * width**-0.5 * rstd_x * rstd_k
    slope = (width**-0.5 * rstd_x * rstd_k / dot.abs()).sqrt()
    delta = (go * value[:, None]).sum(dim=-1) * gate_score * (1 - gate_score) * 0.5 * slope
    delta = torch.where((similarity < clamp_value) | (dot == 0), 0, delta)[..., None]
    pull_x, pull_k = ((dot * rstd.square() / width)[..., None] for rstd in (rstd_x, rstd_k))
    grad_x = (go + delta * (key * weight_fused - x * pull_x)).to(hidden_states.dtype)
    grad_k = (delta * (x * weight_fused - key * pull_k)).to(k.dtype)
    grad_v = (go * gate_score[..., None]).sum(dim=1).to(v.dtype)
    grad_w = delta * (x * key)
    if image_token_mask is not None:
        image = image_token_mask[:, None, None]
        grad_x = torch.where(image, grad_out, grad_x)
        grad_k, grad_w = torch.where(image, 0, grad_k), torch.where(image, 0, grad_w)
        grad_v = torch.where(image_token_mask[:, None], 0, grad_v)
    # Token t adds to row t modulo P.
    rows = config.get_num_sms()
    grad_w = torch.nn.functional.pad(grad_w, (0, 0, 0, 0, 0, -tokens % rows))
    return grad_x, grad_k, grad_v, grad_w.view(-1, rows, streams, width).sum(dim=0)
