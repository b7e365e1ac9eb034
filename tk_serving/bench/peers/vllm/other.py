"""Engram and rotary embedding of vLLM."""

from __future__ import annotations

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, covers, need


def engram_gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
) -> PeerCall:
    """The Triton kernel behind ``Engram.forward``, after the kv projection."""
    engram, triton = need("vllm.models.deepseek_v41.common.engram"), need("triton")
    tokens, streams, dim = hidden_states.shape
    kv = torch.cat([k.reshape(tokens, -1), v], dim=1)
    ones = torch.ones_like(weight_fused)
    mask = hidden_states if image_token_mask is None else ~image_token_mask
    block = triton.next_power_of_2(dim)
    output = torch.empty_like(hidden_states)

    def run() -> Tensor:
        engram._fused_engram_post_wkv_kernel[(tokens * streams,)](
            *(hidden_states, kv, weight_fused, ones, mask, output, tokens),
            *(*hidden_states.stride(), *kv.stride(), *weight_fused.stride(), *ones.stride()),
            *(0 if image_token_mask is None else 1, *output.stride(), eps, clamp_value),
            DIM=dim,
            HC_MULT=streams,
            BLOCK_SIZE=block,
            HAS_MASK=image_token_mask is not None,
            num_warps=8 if block >= 2048 else 4,
        )
        return output

    note = "saves nothing for a backward pass" if save_for_backward else ""
    return PeerCall(run, lambda out: (out, None, None, None, None), note)


def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> PeerCall:
    """``_C.rotary_embedding``, with the cache in the dtype of the query as the engine keeps it."""
    covers(query.dim() == 3 and positions is not None and seqlen_offset == 0, "[T, heads, rot] with positions")
    ops = need("vllm._custom_ops")
    assert positions is not None
    cache, rows = _with_rows_outside(cos_sin_cache, positions)
    cache = cache.to(query.dtype)
    tail = (0, True) if conjugate else ()
    return PeerCall(
        lambda: ops.rotary_embedding(rows, query, key, query.shape[-1], cache, not interleaved, *tail),
        note="angles rounded to the dtype of the query",
    )


def apply_rotary_and_per_token_cast(
    x: Tensor, cos_sin_cache: Tensor, positions: Tensor, num_groups: int, conjugate: bool = False
) -> PeerCall:
    """The Triton kernel in front of V4's output projections."""
    covers(conjugate, "the inverse rotation")
    fused = need("vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant")
    heads, head_dim, rot = x.shape[1], x.shape[2], cos_sin_cache.shape[1]
    cache, rows = _with_rows_outside(cos_sin_cache, positions)
    sizes = (num_groups, heads // num_groups, head_dim - rot, rot, 128)
    return PeerCall(lambda: fused.fused_inv_rope_fp8_quant(x, rows, cache, *sizes))


def _with_rows_outside(cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """For kernels that read the cache at any position: those outside get a row that turns by nothing."""
    still = torch.zeros_like(cos_sin_cache[:1])
    still[:, : still.shape[1] // 2] = 1
    inside = (positions >= 0) & (positions < len(cos_sin_cache))
    return torch.cat([cos_sin_cache, still]), torch.where(inside, positions, len(cos_sin_cache)).long()
