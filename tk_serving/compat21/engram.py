"""The Engram gate with keys and value packed in one buffer, in the argument order of the 2.1 line."""

from torch import Tensor

from tk_serving.engram._shapes import split_packed
from tk_serving.engram.engram_gate_bwd_packed import engram_gate_bwd_packed
from tk_serving.engram.engram_gate_fwd import engram_gate_fwd as unpacked_gate_fwd
from tk_serving.expect import Expect


def engram_gate_fwd(
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``engram.engram_gate_fwd`` on the views of ``kv``.

    Args:
        kv: bfloat16 [T, h + 1, D]: streams 0 ... h - 1 are the keys, stream h is the value.
        others: as ``engram.engram_gate_fwd``.
    """
    expect = Expect("engram_gate_fwd")
    expect.kind(isinstance(kv, Tensor), "kv", "a torch.Tensor", type(kv).__name__)
    expect.that(kv.dim() == 3 and kv.shape[1] > 1, "kv", "shape [T, h + 1, D]", list(kv.shape))
    return unpacked_gate_fwd(
        hidden_states,
        *split_packed(kv),
        weight_fused,
        eps,
        clamp_value,
        save_for_backward,
        image_token_mask=image_token_mask,
        inplace=inplace,
    )


def engram_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``engram.engram_gate_bwd_packed``: (grad_x, grad_kv, grad_w_partial)."""
    saved = (dot, gate_score, rstd_x, rstd_k)
    return engram_gate_bwd_packed(
        grad_out, hidden_states, kv, weight_fused, *saved, clamp_value, image_token_mask=image_token_mask
    )
