"""The Engram gate: how much of the value read from the tables each stream takes."""

from typing import Any

import torch
from torch import Tensor

from tk_serving import config
from tk_serving.arithmetic import wide
from tk_serving.compare import Diff
from tk_serving.engram._shapes import check_gate, fine_tuning, split_packed
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import PHASES, Maker, Workload

_expect = Expect("engram_gate_fwd")


def _plan(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool,
    image_token_mask: Tensor | None,
    inplace: bool,
) -> Plan:
    tokens, streams, hidden = check_gate(_expect, hidden_states, k, v, weight_fused, clamp_value, image_token_mask)
    _expect.positive("eps", eps)
    saved = Out((tokens, streams), torch.float32)
    output = None if inplace else Out((tokens, streams, hidden), torch.bfloat16)
    outputs = (output, *([saved if save_for_backward else None] * 4))
    launch = Launch(
        "engram.engram_gate_fwd",
        {
            "hidden": hidden,
            "wide": aligned(hidden_states, k, v, weight_fused),
            "inplace": inplace,
            "blocks_per_sm": _blocks_per_sm(hidden),
            "stages": _stages(hidden),
            "threads": 256 if 2048 < hidden <= 4096 else 128,
        },
        _arguments,
    )
    # Stand-ins for a mask and saved values that are absent; the kernel touches neither.
    scratch = (Out((tokens,), torch.uint8), saved)
    refusal = f"rows of {hidden} columns do not fit the shared memory twice" if _blocks_per_sm(hidden) == 0 else None
    return Plan(outputs, (launch,) if tokens and refusal is None else (), scratch, refusal)


_SHARED_MEMORY = 228 * 1024  # of a multiprocessor
_OTHER = 2048  # bytes that a block takes besides its rows


def _blocks_per_sm(hidden: int) -> int:
    """As many as have room for two stages of x, k and v, and the weight."""
    return min(8, _SHARED_MEMORY // (16 * hidden + _OTHER))


def _stages(hidden: int) -> int:
    """As many as these blocks have room for."""
    blocks = max(1, _blocks_per_sm(hidden))
    return min(4, (_SHARED_MEMORY // blocks - _OTHER - 4 * hidden) // (6 * hidden))


def _arguments(
    buffers: list[Tensor],
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool,
    image_token_mask: Tensor | None,
    inplace: bool,
) -> tuple:
    output, *saved, no_mask, nothing = buffers
    tokens, streams, hidden = hidden_states.shape
    masked = image_token_mask is not None
    mask = no_mask if image_token_mask is None else image_token_mask.view(torch.uint8)
    saved = saved if save_for_backward else [nothing] * 4
    groups = min(tokens, max(1, config.get_num_sms() * _blocks_per_sm(hidden) // streams))
    flags = (eps, clamp_value, int(masked), int(save_for_backward), groups)
    written = hidden_states if inplace else output
    return hidden_states, k, v, weight_fused, mask, written, *saved, *flags


def _finish(results: Any, *args: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    hidden_states, save_for_backward, inplace = args[0], args[6], args[8]
    output, *saved = results
    return hidden_states if inplace else output, *(saved if save_for_backward else [None] * 4)


def _traffic(hidden_states: Tensor, k: Tensor, v: Tensor, weight_fused: Tensor, *rest: Any) -> int:
    save_for_backward, image_token_mask = rest[2], rest[3]
    tokens, streams, _ = hidden_states.shape
    moved = 2 * (2 * hidden_states.numel() + k.numel() + v.numel()) + 4 * weight_fused.numel()
    return moved + (16 * tokens * streams if save_for_backward else 0) + (0 if image_token_mask is None else tokens)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    streams: int = 4,
    save: bool = True,
    images: bool = False,
    inplace: bool = False,
    packed: bool = True,
) -> tuple:
    x = make.randn(tokens, streams, hidden, dtype=torch.bfloat16)
    kv = make.randn(tokens, streams + 1, hidden, dtype=torch.bfloat16)
    k, v = split_packed(kv)
    if not packed:
        k, v = make.value(k.contiguous()), make.value(v.contiguous())
    weight = make.randn(streams, hidden, scale=0.5)
    mask = make.randint(0, 2, tokens, dtype=torch.bool) if images else None
    if mask is not None:
        kv.masked_fill_(mask[:, None, None], torch.inf)  # must not show in any output
    return x, k, v, weight, 1e-6, 1e-6, save, mask, inplace


@operator(
    spec="operators.md P31",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=Diff(2e-10),
    mutates=("hidden_states",),
    traffic=_traffic,
    finish=_finish,
    moves_data=True,
    cases=[
        {"tokens": 0, "hidden": 256},
        {"tokens": 1, "hidden": 1024},
        {"tokens": 3, "hidden": 1024, "packed": False, "save": False},
        {"tokens": 7, "hidden": 1280, "images": True, "streams": 2},
        {"tokens": 5, "hidden": 256, "images": True, "inplace": True, "streams": 3},
    ],
    workloads=[
        Workload(f"v4.1-{phase}", {"hidden": 5120, "save": False, "inplace": True}, tokens, "v4.1")
        for phase, tokens in PHASES.items()
    ]
    + fine_tuning(4096, 8192),
    peers=["vllm", "sglang", "tile_kernels"],
)
def engram_gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    *,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Hidden states plus the gated value; the residual is added here, so a model must not add it again.

    In float32 for each token and stream: dot = sum(x w k), z = dot rstd_x rstd_k / sqrt(D),
    gate = sigmoid(copysign(sqrt(max(|z|, clamp_value)), z)), output = x + gate v. At z = +0 the gate is
    sigmoid(sqrt(clamp_value)), at -0 its mirror image below one half.

    Args:
        hidden_states: x, bfloat16 [T, h, D], contiguous, D a multiple of 256.
        k: bfloat16 [T, h, D], stride(-1) == 1, other strides free (a view of one kv buffer, for instance).
        v: bfloat16 [T, D], as k.
        weight_fused: float32 [h, D], contiguous; see ``fused_weight``.
        eps: added to the mean squares; positive.
        clamp_value: smallest magnitude of z; positive (1e-6 in the models).
        save_for_backward: also return what the backward pass needs.
        image_token_mask: bool [T]; where True the output is x bit for bit and the saved values are 0.
        inplace: write the output over hidden_states.

    Returns:
        (output bfloat16 [T, h, D], dot, gate, rstd_x, rstd_k float32 [T, h]); None for the last four without
        save_for_backward. dot is the raw sum.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout, device, or a number that is not positive.
    """
    width = hidden_states.shape[-1]
    x, key = wide(hidden_states), wide(k)
    dot = (x * weight_fused * key).sum(dim=-1)
    rstd_x = 1 / (x.square().mean(dim=-1) + eps).sqrt()
    rstd_k = 1 / (key.square().mean(dim=-1) + eps).sqrt()
    z = dot * rstd_x * rstd_k * width**-0.5
    gate = torch.sigmoid(torch.copysign(z.abs().clamp_min(clamp_value).sqrt(), z))
    output = (x + gate[..., None] * wide(v)[:, None]).to(hidden_states.dtype)
    if image_token_mask is not None:
        output = torch.where(image_token_mask[:, None, None], hidden_states, output)
        image = image_token_mask[:, None]
        dot, gate, rstd_x, rstd_k = (torch.where(image, 0, value) for value in (dot, gate, rstd_x, rstd_k))
    if inplace:
        hidden_states.copy_(output)
    if not save_for_backward:
        return output, None, None, None, None
    return output, dot, gate, rstd_x, rstd_k
