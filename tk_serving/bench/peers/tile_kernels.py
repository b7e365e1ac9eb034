"""tile-kernels 2.1.0. It needs TileLang 0.1.15 or newer, so it always has a process of its own (``--site``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, PeerUnavailableError, need, nothing_else

OWN_PROCESS = True

_PLACES = ("quant", "moe", "engram", "mhc", "transpose", "transform", "modeling.mhc.ops")


def __getattr__(name: str) -> Callable[..., PeerCall]:
    """Operators that have the same name and arguments there need no function here."""
    if name.startswith("_") or name.isupper():
        raise AttributeError(name)

    def same(**arguments: Any) -> PeerCall:
        function = _find(name)
        given = {key: value for key, value in arguments.items() if value is not None and value is not False}
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
    given: dict[str, Any] = {name: value for name, value in flags.items() if value}
    if topk_weights is not None and pos_to_token_topk is not None:
        rows = topk_weights.reshape(-1)[pos_to_token_topk.clamp(min=0).long()]
        given["topk_weights"] = torch.where(pos_to_token_topk >= 0, rows, 0.0)
    run = lambda: function(x, fmt, num_per_channels=num_per_channels, **given)  # noqa: E731
    return PeerCall(run, None, "also computes padding rows") if pos_to_expert is not None else PeerCall(run)


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
    given = {} if image_token_mask is None else {"image_token_mask": image_token_mask}
    return PeerCall(lambda: function(hidden_states, kv, weight_fused, eps, clamp_value, save_for_backward, **given))


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> PeerCall:
    """The forward half, writing into a given tensor."""
    function, target = _find("mhc_post_fwd"), torch.empty_like(residual)
    return PeerCall(lambda: function(x, residual, post_layer_mix, comb_res_mix, target), lambda _: target)


def moe_topk_gate(**arguments: Any) -> PeerCall:
    """The 2.1 name of the gate without groups."""
    nothing_else({name: arguments.pop(name) for name in ("hash_table", "token_ids", "int32_ids")})
    function = _find("moe_topk_gate_forward")
    given = {name: value for name, value in arguments.items() if value is not None}
    return PeerCall(lambda: function(**given))


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
