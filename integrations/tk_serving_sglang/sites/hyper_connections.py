"""Manifold hyper-connections of V4: everything between two sublayers, and the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.mhc.expand_to_mhc import expand_to_mhc
from tk_serving.mhc.mhc_head_fused import mhc_head_fused
from tk_serving.mhc.mhc_post import mhc_post as post_operator
from tk_serving.mhc.mhc_post_pre_fused import mhc_post_pre_fused
from tk_serving.mhc.mhc_pre_apply_mix import mhc_pre_apply_mix
from tk_serving.mhc.mhc_pre_fused import mhc_pre_fused
from tk_serving.mhc.mhc_pre_split_mixes import mhc_pre_split_mixes
from tk_serving.mhc.sinkhorn_normalize import sinkhorn_normalize
from tk_serving_patches import Function, Site
from tk_serving_sglang.sites._calls import on, plan, symmetric

_MHC = "sglang.kernels.ops.layernorm.mhc"
_SPLITS = 16  # the operators' upper bound; SGLang's own numbers are for its kernels
_POST_FACTOR = 2.0  # of the post gates in SGLang's Sinkhorn kernel

_PRE, _POST, _POST_PRE = ("mhc_pre_fused",), ("mhc_post",), ("mhc_post_pre_fused",)
_SINKHORN = ("mhc_pre_split_mixes", "sinkhorn_normalize")
_COMBINE, _BROADCAST, _HEAD = ("mhc_pre_apply_mix",), ("expand_to_mhc",), ("mhc_head_fused",)


def _norm(norm_weight: Tensor | None, norm_eps: float | None) -> dict[str, Any]:
    """SGLang's kernel takes the RMS of the row before it is rounded."""
    if norm_weight is None:
        return {}
    return {"norm_weight": norm_weight, "norm_eps": norm_eps, "rms_before_rounding": True}


def _pre(original: Callable[..., Any]) -> Callable[..., Any]:
    """Residual [..., 4, H] to (post, comb, input of the sublayer)."""

    def mhc_pre(
        residual: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        n_splits: int = 1,
        n_splits_pre: int = 32,
        *,
        norm_weight: Tensor | None = None,
        norm_eps: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gates = (hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
        call, options = (residual, fn, *gates, _SPLITS), _norm(norm_weight, norm_eps)
        run = plan("mhc-pre", _PRE, mhc_pre_fused, *call, reason=symmetric(), **options)
        if run is None:
            return original(residual, fn, *gates, n_splits, n_splits_pre, norm_weight=norm_weight, norm_eps=norm_eps)
        post, comb, x, _, _ = run()
        return post, comb, x

    return mhc_pre


def _post(original: Callable[..., Any]) -> Callable[..., Any]:
    """The streams after a sublayer."""

    def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
        call = (x, residual, post_layer_mix.reshape(*residual.shape[:-1], 1), comb_res_mix)
        run = plan("mhc-post", _POST, post_operator, *call)
        return original(x, residual, post_layer_mix, comb_res_mix) if run is None else run()

    return mhc_post


def _post_pre(original: Callable[..., Any]) -> Callable[..., Any]:
    """From the output of a sublayer to (residual, post, comb, input of the next)."""

    def mhc_fused_post_pre(
        x: Tensor,
        residual: Tensor,
        post_layer_mix: Tensor,
        comb_res_mix: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        n_splits: int = 1,
        tile_n: int = 1,
        *,
        norm_weight: Tensor | None = None,
        norm_eps: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates = (hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
        mixes = (post_layer_mix.reshape(*residual.shape[:-1], 1), comb_res_mix)
        call, options = (x, residual, *mixes, fn, *gates, _SPLITS), _norm(norm_weight, norm_eps)
        run = plan("mhc-post-pre", _POST_PRE, mhc_post_pre_fused, *call, reason=symmetric(), **options)
        if run is None:
            given = (x, residual, post_layer_mix, comb_res_mix, fn, *gates, n_splits, tile_n)
            return original(*given, norm_weight=norm_weight, norm_eps=norm_eps)
        updated, post, comb, layer_input, _, _ = run()
        return updated, post, comb, layer_input

    return mhc_fused_post_pre


def _split_sinkhorn(original: Callable[..., Any]) -> Callable[..., Any]:
    """Raw mixes [B, S, 24] to (pre, post, comb)."""

    def hc_split_sinkhorn(
        mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_mult: int = 4, sinkhorn_iters: int = 20, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = (mixes.contiguous(), hc_scale, hc_base, hc_mult, _POST_FACTOR, eps)
        run = plan("mhc-sinkhorn", _SINKHORN, mhc_pre_split_mixes, *call)
        if run is None:
            return original(mixes, hc_scale, hc_base, hc_mult, sinkhorn_iters, eps)
        pre, post, comb = run()
        return pre.squeeze(-1), post.squeeze(-1), sinkhorn_normalize(comb, sinkhorn_iters, eps)

    return hc_split_sinkhorn


def _combine(original: Callable[..., Any]) -> Callable[..., Any]:
    """The weighted sum of the streams."""

    def mhc_combine(x_flat: Tensor, pre: Tensor, hc: int, out_dtype: torch.dtype) -> Tensor:
        reason = None
        if out_dtype != torch.bfloat16 or not x_flat.is_contiguous():
            reason = f"dtype {out_dtype}" if out_dtype != torch.bfloat16 else "tensors with gaps"
        call = (x_flat.reshape(x_flat.shape[0], hc, -1), pre.float().reshape(-1, hc, 1).contiguous())
        run = plan("mhc-combine", _COMBINE, mhc_pre_apply_mix, *call, reason=reason)
        return original(x_flat, pre, hc, out_dtype) if run is None else run()

    return mhc_combine


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    """The embedding as the first streams."""

    def hc_broadcast(x: Tensor, hc_mult: int) -> Tensor:
        run = plan("mhc-broadcast", _BROADCAST, expand_to_mhc, x, hc_mult)
        return original(x, hc_mult) if run is None else run()

    return hc_broadcast


def _head(original: Callable[..., Any]) -> Callable[..., Any]:
    """The streams as one, before the last norm."""

    def fused_hc_head(
        x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, norm_eps: float, hc_eps: float
    ) -> Tensor:
        call = (x, hc_fn, hc_scale.reshape(1), hc_base, norm_eps, hc_eps, _SPLITS)
        run = plan("mhc-head", _HEAD, mhc_head_fused, *call)
        return original(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps) if run is None else run()

    return fused_hc_head


def _site(name: str, operators: tuple[str, ...], target: str, make: Any, why: str, how: str) -> Site:
    until = "SGLang's registry of kernels dispatches hyper-connections."
    return Site(name, operators, (Function(target, make),), why, how, until, _SOURCES[name], on("cuda"))


_SOURCES = {
    "mhc-pre": {"0.5.23": "07f775cff57a152e"},
    "mhc-post": {"0.5.23": "e8979e3804151e5a"},
    "mhc-post-pre": {"0.5.23": "85ffab3ed4186b08"},
    "mhc-sinkhorn": {"0.5.23": "e0601d63c736e61a"},
    "mhc-combine": {"0.5.23": "d8f1c2884648d1de"},
    "mhc-broadcast": {"0.5.23": "c9c4cdda396e442d"},
    "mhc-head": {"0.5.23": "1c5e38724c50257d"},
}

SITES = (
    _site(
        "mhc-pre",
        _PRE,
        f"{_MHC}:mhc_pre",
        _pre,
        "Product, norm, gates, Sinkhorn, weighted sum and the sublayer's norm in two launches.",
        "As SGLang; results that have to lie in symmetric memory stay with it.",
    ),
    _site("mhc-post", _POST, f"{_MHC}:mhc_post", _post, "Wide loads, streams read once.", "As SGLang."),
    _site(
        "mhc-post-pre",
        _POST_PRE,
        f"{_MHC}:mhc_fused_post_pre",
        _post_pre,
        "From one sublayer to the next in two launches (three at H 7168 from 64 tokens).",
        "As SGLang, whose fused form holds up to 32 tokens; symmetric memory stays with it.",
    ),
    _site(
        "mhc-sinkhorn",
        _SINKHORN,
        f"{_MHC}:hc_split_sinkhorn",
        _split_sinkhorn,
        "The same bits as the fused operators.",
        "Where the model runs the steps one by one.",
    ),
    _site("mhc-combine", _COMBINE, f"{_MHC}:mhc_combine", _combine, "Streams read once.", "bfloat16 results."),
    _site("mhc-broadcast", _BROADCAST, f"{_MHC}:hc_broadcast", _broadcast, "Wide stores.", "As SGLang."),
    _site(
        "mhc-head",
        _HEAD,
        "sglang.kernels.ops.layernorm.mhc_head:fused_hc_head",
        _head,
        "Product, norm, gates and weighted sum in two launches.",
        "As SGLang.",
    ),
)
