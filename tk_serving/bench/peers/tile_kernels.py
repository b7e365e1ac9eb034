"""tile-kernels 2.1.0. It needs TileLang 0.1.15 or newer, so it always has a process of its own (``--site``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, PeerUnavailableError, covers, need, nothing_else

OWN_PROCESS = True

_PLACES = ("quant", "moe", "engram", "mhc", "transpose", "transform", "modeling.mhc.ops")


def __getattr__(name: str) -> Callable[..., PeerCall]:
    """Operators that have the same name and arguments there need no function here."""
    if name.startswith("_") or name.isupper():
        raise AttributeError(name)

    def same(**arguments: Any) -> PeerCall:
        function = _find(name)
        given = _used(arguments)
        return PeerCall(lambda: function(**given))

    return same


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    sf_clamp_min: float | None = None,
    zero_padding: bool = True,
    **rest: Any,
) -> PeerCall:
    """The 2.1 form: routing weights in row order, no map of padding rows."""
    nothing_else({**rest, "clamped_count": clamped_count, "sf_clamp_min": sf_clamp_min})
    function = _find("swiglu_forward_and_per_token_cast")
    flags = {
        "use_tma_aligned_col_major_sf": use_tma_aligned_col_major_sf,
        "round_sf": round_sf,
        "use_packed_ue8m0": use_packed_ue8m0,
        "clamp_value": swiglu_clamp_value,
    }
    given = _used(flags)
    if topk_weights is not None and pos_to_token_topk is not None:
        rows = topk_weights.reshape(-1)[pos_to_token_topk.clamp(min=0).long()]
        given["topk_weights"] = torch.where(pos_to_token_topk >= 0, rows, 0.0)
    run = lambda: function(x, fmt, num_per_channels=num_per_channels, **given)  # noqa: E731
    return PeerCall(run, None, "also computes padding rows") if pos_to_expert is not None else PeerCall(run)


def swiglu_forward_and_per_token_cast_grouped(**arguments: Any) -> PeerCall:
    """The 2.1 name of the same call."""
    function = _find("swiglu_forward_and_per_token_cast")
    given = _used(arguments)
    return PeerCall(lambda: function(**given))


def swiglu_backward(x: Tensor, grad_out: Tensor, **rest: Any) -> PeerCall:
    """The 2.1 names of its arguments."""
    function, given = _find("swiglu_backward"), _used(rest)
    fmt = "bf16" if x.dtype == torch.bfloat16 else "fp32"
    return PeerCall(lambda: function(x, grad_out, fmt, **given))


def swiglu_backward_and_per_token_cast(
    x: tuple[Tensor, Tensor],
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
) -> PeerCall:
    """The 2.1 form: routing weights in row order."""
    function = _find("swiglu_backward_and_per_token_cast")
    rows = torch.where(pos_to_token_topk >= 0, weight.reshape(-1)[pos_to_token_topk.clamp(min=0).long()], 0.0)
    given = _used({"round_sf": round_sf, "clamp_value": swiglu_clamp_value})
    return PeerCall(
        lambda: function(
            x, grad_out, "e4m3", num_per_channels=num_per_channels, topk_weights=rows, do_recompute=True, **given
        ),
        None,
        "writes no gradient without quantisation; weight gradients in row order",
    )


def per_channel_cast_fused(x: Any, pos_to_token: Tensor | None = None, **rest: Any) -> PeerCall:
    """``per_channel_cast``: dequantises on the way in, does not gather rows."""
    covers(pos_to_token is None, "calls that take the rows in their order")
    function, given = _find("per_channel_cast"), _used(rest)
    return PeerCall(lambda: function(x, **given))


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
    """The 2.1 form: keys and value in one buffer."""
    function = _find("engram_gate_fwd")
    kv = torch.cat([k, v.unsqueeze(1)], dim=1)
    given = _used({"image_token_mask": image_token_mask, "inplace": inplace})
    return PeerCall(lambda: function(hidden_states, kv, weight_fused, eps, clamp_value, save_for_backward, **given))


def engram_gate_bwd(
    grad_out: Tensor, hidden_states: Tensor, k: Tensor, v: Tensor, image_token_mask: Tensor | None = None, **rest: Any
) -> PeerCall:
    """The 2.1 form: keys and value, and their gradients, in one buffer."""
    function = _find("engram_gate_bwd")
    kv = torch.cat([k, v.unsqueeze(1)], dim=1)
    given = {**rest, **_used({"image_token_mask": image_token_mask})}

    def split(result: tuple) -> tuple:
        grad_hidden, grad_kv, grad_weight = result
        return grad_hidden, grad_kv[:, :-1], grad_kv[:, -1], grad_weight

    return PeerCall(lambda: function(grad_out, hidden_states, kv, **given), split)


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> PeerCall:
    """The forward half, of [B, S, ...] tensors, writing into a given one."""
    function, target = _find("mhc_post_fwd"), torch.empty_like(residual)
    batch = [part.unsqueeze(0) for part in (x, residual, post_layer_mix, comb_res_mix, target)]
    return PeerCall(lambda: function(*batch), lambda _: target)


def mhc_post_bwd(fuse_grad_acc: bool = True, **arguments: Tensor) -> PeerCall:
    """The backward half, of [B, S, ...] tensors."""
    function, batch = _find("mhc_post_bwd"), {name: value.unsqueeze(0) for name, value in arguments.items()}
    return PeerCall(lambda: function(**batch), lambda grads: tuple(grad.squeeze(0) for grad in grads))


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> PeerCall:
    """``expand_to_mhc_fwd``."""
    target = torch.empty(*hidden.shape[:-1], mhc_mult, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    return _into("expand_to_mhc_fwd", (hidden,), target)


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> PeerCall:
    """``mhc_pre_apply_mix_fwd``."""
    return _into("mhc_pre_apply_mix_fwd", (x, mix.squeeze(-1)), torch.empty_like(x[..., 0, :]))


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6, out: Tensor | None = None) -> PeerCall:
    """``mhc_sinkhorn_fwd``."""
    return _into("mhc_sinkhorn_fwd", (x,), torch.empty_like(x), repeat, eps)


def mhc_sinkhorn_bwd(
    grad_out: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6, x_grad: Tensor | None = None
) -> PeerCall:
    """The backward half of the same."""
    return _into("mhc_sinkhorn_bwd", (grad_out, x), torch.empty_like(x), repeat, eps)


def mhc_head_compute_mix(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float, out: Tensor | None = None
) -> PeerCall:
    """``mhc_head_compute_mix_fwd``."""
    operands = (input_mix, mhc_scale, mhc_base)
    return _into("mhc_head_compute_mix_fwd", operands, torch.empty_like(input_mix), mhc_pre_eps)


def mhc_fn_normw_merge_fwd(mhc_fn: Tensor, mhc_norm_weight: Tensor, out: Tensor | None = None) -> PeerCall:
    """The same call."""
    return _into("mhc_fn_normw_merge_fwd", (mhc_fn, mhc_norm_weight), torch.empty_like(mhc_fn))


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
    **out: Tensor | None,
) -> PeerCall:
    """``mhc_pre_split_mixes_fwd``."""
    function, rows = _find("mhc_pre_split_mixes_fwd"), input_mixes.shape[0]
    pre, post, comb = (torch.empty(rows, n, device=input_mixes.device) for n in (mhc_mult, mhc_mult, mhc_mult**2))
    shaped = (pre.unsqueeze(-1), post.unsqueeze(-1), comb.view(rows, mhc_mult, mhc_mult))
    call = functools.partial(function, input_mixes, mhc_scale, mhc_base, pre, post, comb)
    return PeerCall(lambda: call(mhc_post_mult_value, mhc_pre_eps), lambda _: shaped)


def mhc_pre_big_fuse_fwd(post_mix: Tensor, comb_mix: Tensor, **rest: Any) -> PeerCall:
    """The same call, with the mixes of a row in one dimension."""
    function = _find("mhc_pre_big_fuse_fwd")
    flat = {"post_mix": post_mix.flatten(1), "comb_mix": comb_mix.flatten(1)}
    return PeerCall(lambda: function(**flat, **rest))


def moe_topk_gate(**arguments: Any) -> PeerCall:
    """The 2.1 name of the gate without groups."""
    covers(arguments["scoring_func"] == "sqrtsoftplus", "sqrtsoftplus scores")
    nothing_else({name: arguments.pop(name) for name in ("hash_table", "token_ids", "int32_ids")})
    function = _find("moe_topk_gate_forward")
    given = {name: value for name, value in arguments.items() if value is not None}
    return PeerCall(lambda: function(**given))


def moe_topk_gate_backward(**arguments: Any) -> PeerCall:
    """The same call."""
    covers(arguments["scoring_func"] == "sqrtsoftplus", "sqrtsoftplus scores")
    function, given = _find("moe_topk_gate_backward"), _used(arguments)
    return PeerCall(lambda: function(**given))


def norm_forward_and_per_token_cast(num_per_channels: int, **rest: Any) -> PeerCall:
    """The same call."""
    covers(num_per_channels == 32, "groups of 32")
    function, given = _find("norm_forward_and_per_token_cast"), _used(rest)
    return PeerCall(lambda: function(num_per_channels=num_per_channels, **given))


def per_token_cast_with_precomputed_sf(sf: Tensor, **rest: Any) -> PeerCall:
    """The same call; it has to be told of scales in columns."""
    function, given = _find("per_token_cast_with_precomputed_sf"), _used(rest)
    if sf.dim() == 2 and sf.stride(0) == 1:
        given["use_tma_aligned_col_major_sf"] = True
    return PeerCall(lambda: function(sf=sf, **given))


def per_block_cast_lossless(x: tuple[Tensor, Tensor], **rest: Any) -> PeerCall:
    """The same call; scales further apart than 2**11, at which it traps, are brought closer."""
    function, given = _find("per_block_cast_lossless"), _used(rest)
    data, sf = x
    if sf.dtype == torch.float32:
        near = sf.clamp(min=float(sf.max()) * 2.0**-11)
    else:
        exponents = sf.t().contiguous().view(torch.uint8)
        near = exponents.clamp(min=int(exponents.max()) - 11).view(torch.int32).t()
    return PeerCall(lambda: function((data, near), **given), None, "with scales at most 2**11 apart")


def _into(name: str, operands: tuple, target: Tensor, *options: Any) -> PeerCall:
    """A function that writes into a given tensor."""
    function = _find(name)
    return PeerCall(lambda: function(*operands, target, *options), lambda _: target)


def _used(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without the options that are off: not every function there knows all of them."""
    return {name: value for name, value in arguments.items() if value is not None and value is not False}


def _find(name: str) -> Callable[..., Any]:
    need("tile_kernels")
    for place in _PLACES:
        try:
            function = getattr(need(f"tile_kernels.{place}"), name, None)
        except PeerUnavailableError:
            continue
        if callable(function):
            return function
    raise PeerUnavailableError(f"tile_kernels has no {name}")
