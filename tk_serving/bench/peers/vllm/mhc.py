"""Hyper-connections of vLLM: TileLang kernels, the pre-norm GEMM from DeepGEMM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tk_serving.bench.peers import PeerCall, covers, need, nothing_else
from tk_serving.bench.peers.vllm.quant import per_token_cast

TILELANG = "vllm.model_executor.kernels.mhc.tilelang"


def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
    **rest: Any,
) -> PeerCall:
    """``mhc_pre_tilelang``: DeepGEMM's TF32 pre-norm GEMM, then one TileLang kernel."""
    nothing_else(rest)
    mhc = need(TILELANG)
    eps = (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps)
    shape = residual.shape[:-2]
    return PeerCall(
        lambda: mhc.mhc_pre_tilelang(residual, fn, mhc_scale, mhc_base, *eps, mhc_post_mult_value, sinkhorn_repeat),
        lambda r: (r[0].view(*shape, 4, 1), r[1].view(*shape, 4, 4), r[2]),
    )


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> PeerCall:
    """``mhc_post_tilelang``."""
    covers(residual.is_contiguous(), "contiguous residuals")
    mhc = need(TILELANG)
    return PeerCall(lambda: mhc.mhc_post_tilelang(x, residual, post_layer_mix, comb_res_mix))


def mhc_pre_fused(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    delayed: bool = False,
    pre_mix: Tensor | None = None,
    rms_before_rounding: bool = False,
    **cast: Any,
) -> PeerCall:
    """``mhc_pre_tilelang`` (``mhc_pre_delayed_tilelang``) with the norm inside, then the group cast."""
    covers(residual.dim() == 3, "[T, 4, H] residuals")
    mhc = need(TILELANG)
    mixer = (residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps)
    rest = (mhc_post_mult_value, sinkhorn_repeat)
    norm = {"norm_weight": norm_weight, "norm_eps": norm_eps}
    given = None if pre_mix is None else pre_mix.squeeze(-1)

    def run() -> tuple:
        if delayed:
            mixed = mhc.mhc_pre_delayed_tilelang(*mixer, *rest, pre_mix=given, **norm)
        else:
            mixed = (*mhc.mhc_pre_tilelang(*mixer, *rest, **norm), None)
        return mixed, _cast(mixed[2], cast)

    return PeerCall(run, lambda results: _layer_input(results[0], results[1], cast))


def mhc_post_pre_fused(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    delayed: bool = False,
    pre_mix: Tensor | None = None,
    rms_before_rounding: bool = False,
    **cast: Any,
) -> PeerCall:
    """``mhc_fused_post_pre_tilelang`` (``..._delayed_...``) with the norm inside, then the group cast."""
    covers(residual.dim() == 3, "[T, 4, H] residuals")
    mhc = need(TILELANG)
    boundary = (x, residual, post_layer_mix, comb_res_mix)
    mixer = (fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat)
    norm = {"norm_weight": norm_weight, "norm_eps": norm_eps}
    given = None if pre_mix is None else pre_mix.squeeze(-1)

    def run() -> tuple:
        if delayed:
            mixed = mhc.mhc_fused_post_pre_delayed_tilelang(*boundary, *mixer, pre_mix=given, **norm)[:5]
        else:
            mixed = (*mhc.mhc_fused_post_pre_tilelang(*boundary, *mixer, **norm), None)
        return mixed, _cast(mixed[3], cast)

    return PeerCall(run, lambda results: (results[0][0], *_layer_input(results[0][1:], results[1], cast)))


def mhc_head_fused(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    n_splits: int = 16,
    fn_norm_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> PeerCall:
    """``hc_head_fused_kernel_tilelang``."""
    covers(residual.dim() == 3 and norm_weight is None, "[T, 4, H] residuals without a final norm")
    nothing_else({"fn_norm_weight": fn_norm_weight})
    mhc = need(TILELANG)
    return PeerCall(lambda: mhc.hc_head_fused_kernel_tilelang(residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps))


def _cast(x: Tensor, cast: dict[str, Any]) -> Any:
    if cast["fmt"] is None:
        return None
    flags = (cast["use_tma_aligned_col_major_sf"], cast["round_sf"], cast["use_packed_ue8m0"])
    return per_token_cast(x, cast["fmt"], cast["num_per_channels"], None, *flags).run()


def _layer_input(mixed: tuple, quantised: Any, cast: dict[str, Any]) -> tuple:
    """The public result from (post, comb, input, next pre mix) and the quantised input."""
    post, comb, x, pre = mixed
    tokens = x.shape[0]
    kept = x if quantised is None or cast["with_out_bf16"] else None
    return (
        post.view(tokens, 4, 1),
        comb.view(tokens, 4, 4),
        kept,
        quantised,
        None if pre is None else pre.view(tokens, 4, 1),
    )
