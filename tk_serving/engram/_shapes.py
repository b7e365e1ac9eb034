"""Shapes that the Engram operators share: h streams of D columns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.workloads import Workload

COLUMN_MULTIPLE = 256


def check_weight(expect: Expect, argument: str, weight: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """A contiguous [h, D] weight; returns its shape."""
    shape = expect.tensor(argument, weight, dtype, ("h", "D"))
    expect.that(shape[0] > 0, argument, "at least one stream", list(shape))
    expect.multiple(argument, shape[1], COLUMN_MULTIPLE, "a last dimension")
    return shape


def check_gate(
    expect: Expect,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None,
) -> tuple[int, int, int]:
    """The arguments that both passes of the gate have in common; returns T, h, D."""
    tokens, streams, hidden = expect.tensor("hidden_states", hidden_states, torch.bfloat16, ("T", "h", "D"))
    expect.that(streams > 0, "hidden_states", "at least one stream", list(hidden_states.shape))
    expect.multiple("hidden_states", hidden, COLUMN_MULTIPLE, "a last dimension")
    check_strided(expect, "k", k, (tokens, streams, hidden))
    check_strided(expect, "v", v, (tokens, hidden))
    expect.tensor("weight_fused", weight_fused, torch.float32, (streams, hidden))
    expect.positive("clamp_value", clamp_value)
    if image_token_mask is not None:
        expect.tensor("image_token_mask", image_token_mask, torch.bool, (tokens,))
    expect.same_device(
        hidden_states=hidden_states, k=k, v=v, weight_fused=weight_fused, image_token_mask=image_token_mask
    )
    return tokens, streams, hidden


def check_strided(expect: Expect, argument: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """bfloat16 of that shape with a dense last dimension and any other strides."""
    expect.dtype(argument, tensor, torch.bfloat16)
    expect.shape(argument, tensor, shape)
    expect.that(tensor.stride(-1) == 1, argument, "stride(-1) == 1", f"strides {list(tensor.stride())}")


def check_backward(
    expect: Expect,
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    saved: Sequence[Tensor],
    clamp_value: float,
    image_token_mask: Tensor | None,
) -> tuple[int, int, int]:
    """The arguments that the backward passes have in common; returns T, h, D."""
    tokens, streams, hidden = check_gate(expect, hidden_states, k, v, weight_fused, clamp_value, image_token_mask)
    expect.tensor("grad_out", grad_out, torch.bfloat16, (tokens, streams, hidden))
    named = dict(zip(("dot", "gate_score", "rstd_x", "rstd_k"), saved, strict=True))
    for name, value in named.items():
        expect.tensor(name, value, torch.float32, (tokens, streams))
    expect.same_device(hidden_states=hidden_states, grad_out=grad_out, **named)
    return tokens, streams, hidden


def split_packed(kv: Tensor) -> tuple[Tensor, Tensor]:
    """The keys [T, h, D] and the value [T, D] of a packed [T, h + 1, D] buffer."""
    return kv[:, :-1], kv[:, -1]


def fine_tuning(*tokens: int) -> list[Workload]:
    """Hidden sizes that Engram layers are trained with; 5120 is that of V4.1."""
    models = {4096: "", 5120: "v4.1", 7168: ""}
    return [Workload(f"{hidden}-fine-tuning", {"hidden": hidden}, tokens, model) for hidden, model in models.items()]
