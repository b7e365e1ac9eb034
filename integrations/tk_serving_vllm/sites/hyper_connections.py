"""Manifold hyper-connections of DeepSeek-V4: everything between two sublayers, and the head.

vLLM's CUDA model calls functions of one module by name; its CPU model calls layers. Both have the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.mhc.expand_to_mhc import expand_to_mhc
from tk_serving.mhc.mhc_head_fused import mhc_head_fused
from tk_serving.mhc.mhc_post import mhc_post
from tk_serving.mhc.mhc_post_pre_fused import mhc_post_pre_fused
from tk_serving.mhc.mhc_pre_fused import mhc_pre_fused
from tk_serving_patches import Function, Site
from tk_serving_vllm.sites import _handed_over
from tk_serving_vllm.sites._calls import offer, on

_FUNCTIONS = "vllm.model_executor.kernels.mhc.tilelang"
_LAYERS = "vllm.model_executor.layers.mhc"
_SPLITS = 16  # the operators' upper bound; vLLM's own n_splits is unused in its kernels

Mixed = tuple[Tensor, Tensor, Tensor]


def _norm(residual: Tensor, weight: Tensor | None, eps: float) -> dict[str, Any]:
    """Options of the norm behind the sublayer's input, and where there is one of the cast behind it."""
    if weight is None:
        return {}
    return {"norm_weight": weight, "norm_eps": eps, "rms_before_rounding": True, **_quantised(residual)}


def _quantised(residual: Tensor) -> dict[str, Any]:
    """Options that write the sublayer's input in the form that its linear layer reads too, once that is known."""
    cast = _handed_over.wanted(residual.device)
    if cast is None or residual.shape[-1] % cast.group:
        return {}
    return {
        "fmt": "e4m3",
        "num_per_channels": cast.group,
        "use_tma_aligned_col_major_sf": cast.column_major,
        "round_sf": cast.round_sf,
        "with_out_bf16": True,
    }


def _hand_over(x: Tensor, quantised: tuple[Tensor, Tensor] | None) -> None:
    cast = _handed_over.wanted(x.device)
    if quantised is not None and cast is not None:
        _handed_over.give(x, cast, *quantised)
    elif not torch.compiler.is_compiling():
        _handed_over.offer(x)


def _pre(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``mhc_pre_tilelang``: residual [..., 4, H] to (post, comb, input)."""

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
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> Mixed:
        gates = (hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
        options = _norm(residual, norm_weight, norm_eps)
        call = (residual, fn, *gates, _SPLITS)
        run = offer("mhc-pre", residual.shape[0], mhc_pre_fused, *call, **options)
        if run is None:
            return original(residual, fn, *gates, n_splits, norm_weight, norm_eps)
        post, comb, x, quantised, _ = run()
        _hand_over(x, quantised)
        return post, comb, x

    return mhc_pre


def _pre_broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``mhc_pre_broadcast_tilelang``: an embedding [T, H] to (residual [T, 4, H], post, comb, input)."""

    def mhc_pre_broadcast(
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
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        fn_broadcast: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates = (hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
        name, tokens = "mhc-pre-broadcast", residual.shape[0]
        run = offer(name, tokens, expand_to_mhc, residual, 4)
        if run is None:
            return original(residual, fn, *gates, n_splits, norm_weight, norm_eps, fn_broadcast)
        streams = run()
        options = _norm(residual, norm_weight, norm_eps)
        run = offer(name, tokens, mhc_pre_fused, streams, fn, *gates, _SPLITS, **options)
        if run is None:
            return original(residual, fn, *gates, n_splits, norm_weight, norm_eps, fn_broadcast)
        post, comb, x, quantised, _ = run()
        _hand_over(x, quantised)
        return streams, post, comb, x

    return mhc_pre_broadcast


def _post(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``mhc_post_tilelang``: the streams after the last sublayer."""

    def post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
        call = (x, residual, post_layer_mix.view(*residual.shape[:-1], 1), comb_res_mix)
        run = offer("mhc-post", x.shape[0], mhc_post, *call)
        if run is None:
            return original(x, residual, post_layer_mix, comb_res_mix)
        return run()

    return post


def _post_pre(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``mhc_fused_post_pre_tilelang``: from the output of a sublayer to (residual, post, comb, next input)."""

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
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates = (hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
        options = _norm(residual, norm_weight, norm_eps)
        call = (x, residual, post_layer_mix.view(*residual.shape[:-1], 1), comb_res_mix, fn, *gates, _SPLITS)
        run = offer("mhc-post-pre", x.shape[0], mhc_post_pre_fused, *call, **options)
        if run is None:
            given = (x, residual, post_layer_mix, comb_res_mix)
            return original(*given, fn, *gates, n_splits, tile_n, norm_weight, norm_eps)
        updated, post, comb, layer_input, quantised, _ = run()
        _hand_over(layer_input, quantised)
        return updated, post, comb, layer_input

    return mhc_fused_post_pre


def _head(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``hc_head_fused_kernel_tilelang``: the streams as one, before the last norm."""

    def hc_head(
        streams: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, rms_eps: float, hc_eps: float
    ) -> Tensor:
        call = (streams, fn, hc_scale, hc_base, rms_eps, hc_eps, _SPLITS)
        run = offer("mhc-head", streams.shape[0], mhc_head_fused, *call)
        if run is None:
            return original(streams, fn, hc_scale, hc_base, rms_eps, hc_eps)
        return run()

    return hc_head


def _pre_delayed(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``mhc_pre_delayed_tilelang`` of DeepSeek-V4.1: the input takes the gates of the sublayer before."""

    def mhc_pre_delayed(
        residual: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        pre_mix: Tensor | None = None,
        x: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates = (hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
        reason = (
            None if x is None else "the product of the embedding with the summed mixer reads a quarter of the bytes"
        )
        call = (residual, fn, *gates, _SPLITS)
        options: dict[str, Any] = {"norm_weight": norm_weight, "norm_eps": norm_eps, **_delayed(pre_mix)}
        run = offer("mhc-pre-delayed", residual.shape[0], mhc_pre_fused, *call, reason=reason, **options)
        if run is None:
            return original(residual, fn, *gates, pre_mix, x, norm_weight, norm_eps)
        post, comb, layer_input, _, mix = run()
        return post, comb, layer_input, mix.squeeze(-1)

    return mhc_pre_delayed


def _post_pre_delayed(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``mhc_fused_post_pre_delayed_tilelang`` of DeepSeek-V4.1."""

    def mhc_fused_post_pre_delayed(
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
        pre_mix: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        capture_aux: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        gates = (hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
        reason = "a draft model wants the mean of the streams" if capture_aux else None
        call = (x, residual, post_layer_mix.view(*residual.shape[:-1], 1), comb_res_mix, fn, *gates, _SPLITS)
        options: dict[str, Any] = {"norm_weight": norm_weight, "norm_eps": norm_eps, **_delayed(pre_mix)}
        run = offer("mhc-post-pre-delayed", x.shape[0], mhc_post_pre_fused, *call, reason=reason, **options)
        if run is None:
            given = (x, residual, post_layer_mix, comb_res_mix, fn, *gates)
            return original(*given, pre_mix, norm_weight, norm_eps, capture_aux)
        updated, post, comb, layer_input, _, mix = run()
        return updated, post, comb, layer_input, mix.squeeze(-1), x.new_empty(0, x.shape[-1])

    return mhc_fused_post_pre_delayed


def _delayed(pre_mix: Tensor | None) -> dict[str, Any]:
    return {"delayed": True, "pre_mix": None if pre_mix is None else pre_mix.unsqueeze(-1)}


_COMPILED = {
    "HcPrenormGemmTileLangKernel": ("mhc-pre-broadcast", "mhc-pre", "mhc-post-pre"),
    "MhcPreBigFuseTileLangKernel": ("mhc-pre-broadcast", "mhc-pre", "mhc-post-pre"),
    "MhcFusedTileLangKernel": ("mhc-post-pre",),
    "MhcPostTileLangKernel": ("mhc-post", "mhc-post-pre"),
    "HcHeadFusedTileLangKernel": ("mhc-head",),
}
"""Kernels of vLLM by the sites behind which they run."""


def _register_warmup(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``VllmJitKernel.register_warmup``: what no call reaches is not compiled."""

    def register_warmup(self: Any, *args: Any, **kwargs: Any) -> None:
        from tk_serving_vllm import activate

        sites = _COMPILED.get(type(self).__name__)
        if not sites or not all(map(activate.replaced, sites)):
            original(self, *args, **kwargs)

    return register_warmup


def _method(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """The replacement of a function as that of a method with the same arguments."""

    def make_method(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return make(lambda *given: original(self, *given))(*args, **kwargs)

        return method

    return make_method


_UNTIL = "vLLM calls these functions through operators whose kernels can be replaced."
_CPU_WHY = "The same operators as on CUDA, so that the CPU build can try them."
_CPU_HOW = "Runs the torch references, in place of vLLM's AVX-512 code."


def _site(
    name: str, operators: tuple[str, ...], function: str, make: Callable[..., Any], why: str, how: str, source: str
) -> Site:
    return Site(
        name=name,
        operators=operators,
        patches=(Function(f"{_FUNCTIONS}:{function}", make),),
        why=why,
        how=how,
        until=_UNTIL,
        sources={"0.33.0": source},
        unsuitable=on("cuda"),
    )


def _cpu_site(name: str, operators: tuple[str, ...], layer: str, make: Callable[..., Any], source: str) -> Site:
    return Site(
        name=name,
        operators=operators,
        patches=(Function(f"{_LAYERS}:{layer}.forward_cpu", _method(make)),),
        why=_CPU_WHY,
        how=_CPU_HOW,
        until=_UNTIL,
        sources={"0.32.0": source},
        unsuitable=on("cpu"),
    )


SITES = (
    _site(
        "mhc-pre-broadcast",
        ("expand_to_mhc", "mhc_pre_fused"),
        "mhc_pre_broadcast_tilelang",
        _pre_broadcast,
        "The first sublayer's input leaves the kernel quantised, and no kernel of vLLM is compiled for it.",
        "Writes the four equal streams, then reads them as in every other layer. vLLM's product with the summed mixer "
        "reads a quarter of the bytes, once in a model, but compiles a kernel for every way to split it.",
        "83fc5eabb819564a",
    ),
    _site(
        "mhc-pre",
        ("mhc_pre_fused",),
        "mhc_pre_tilelang",
        _pre,
        "Two launches with norm and cast inside.",
        "As vLLM; also writes the input in the FP8 form that the sublayer's first linear layer reads.",
        "744123f0677ee38e",
    ),
    _site(
        "mhc-post-pre",
        ("mhc_post_pre_fused",),
        "mhc_fused_post_pre_tilelang",
        _post_pre,
        "From one sublayer to the next in two launches (three at H 7168 from 64 tokens), norm and cast inside; in two "
        "the streams are read once and written once.",
        "As vLLM; also writes the input in the FP8 form that the sublayer's first linear layer reads.",
        "437cc575336a3e93",
    ),
    _site(
        "mhc-post",
        ("mhc_post",),
        "mhc_post_tilelang",
        _post,
        "Wide loads; the streams after the last sublayer, and those of draft models.",
        "As vLLM.",
        "7c234331d823cd78",
    ),
    _site(
        "mhc-head",
        ("mhc_head_fused",),
        "hc_head_fused_kernel_tilelang",
        _head,
        "Wide loads, in two launches.",
        "As vLLM, in two launches.",
        "97da486151f93146",
    ),
    _site(
        "mhc-pre-delayed",
        ("mhc_pre_fused",),
        "mhc_pre_delayed_tilelang",
        _pre_delayed,
        "The streams are read once for the gates and for the input.",
        "Eager and piecewise graphs of V4.1; the broadcast form of the first layer stays with vLLM, as do the form of "
        "full graphs that uses two streams, and DeepGEMM's mega mHC.",
        "8913b18e6b305f22",
    ),
    _site(
        "mhc-post-pre-delayed",
        ("mhc_post_pre_fused",),
        "mhc_fused_post_pre_delayed_tilelang",
        _post_pre_delayed,
        "From one sublayer to the next in two launches (three at H 7168 from 64 tokens), norm inside.",
        "As mhc-pre-delayed; calls that also want the mean of the streams stay with vLLM.",
        "c8fe1c89057c27fa",
    ),
    Site(
        name="mhc-warm-up",
        operators=(),
        patches=(Function("vllm.model_executor.warmup.jit_warmup:VllmJitKernel.register_warmup", _register_warmup),),
        why="vLLM compiles its kernels for every way to split the product before it serves: minutes on an empty cache.",
        how="Leaves out the kernels of sites that are replaced at every number of tokens.",
        until="vLLM's registry of warm-ups is open to plugins.",
        sources={"0.33.0": "2ed71294da3dd680"},
        unsuitable=on("cuda"),
    ),
    _cpu_site("mhc-pre", ("mhc_pre_fused",), "MHCPreOp", _pre, "e2ed2369ccaef3ac"),
    _cpu_site("mhc-post-pre", ("mhc_post_pre_fused",), "MHCFusedPostPreOp", _post_pre, "070dae802b613123"),
    _cpu_site("mhc-post", ("mhc_post",), "MHCPostOp", _post, "93a772a65114657f"),
    _cpu_site("mhc-head", ("mhc_head_fused",), "HCHeadOp", _head, "daecb4eee7483cab"),
)
