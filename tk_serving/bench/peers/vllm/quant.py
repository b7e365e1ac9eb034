"""Casts, SwiGLU and norms of vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, covers, need, nothing_else

FP8 = torch.float8_e4m3fn
FLOOR = 1e-4  # our amax floor; vLLM's default is 1e-10
FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"


def per_token_cast(
    x: Any,
    fmt: str,
    num_per_channels: int,
    x_block_size: Any = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    **rest: Any,
) -> PeerCall:
    """``_C.per_token_group_fp8_quant`` or its packed form; ``_C.dynamic_per_token_scaled_fp8_quant`` for whole rows."""
    covers(isinstance(x, Tensor) and x.dtype == torch.bfloat16 and fmt == "e4m3", "bf16 to e4m3")
    nothing_else(rest)
    if num_per_channels == x.shape[1] and num_per_channels > 256:
        covers(not round_sf, "whole rows without rounding")
        ops = need("vllm._custom_ops")
        return PeerCall(lambda: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True))
    utils = need(FP8_UTILS)
    if use_packed_ue8m0:
        packed = utils.per_token_group_quant_fp8_packed_for_deepgemm
        return PeerCall(lambda: packed(x, num_per_channels, FLOOR, use_ue8m0=True))
    column = use_tma_aligned_col_major_sf
    cast = utils.per_token_group_quant_fp8
    return PeerCall(lambda: cast(x, num_per_channels, FLOOR, FP8, column, column, use_ue8m0=round_sf))


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
    """The Triton kernels of the DeepGEMM path (packed, column-major), else ``_C.silu_and_mul_per_block_quant``."""
    covers(x.dtype == torch.bfloat16 and num_per_channels in (32, 64, 128), "bf16 in groups of 32 to 128")
    nothing_else({**rest, "clamped_count": clamped_count, "sf_clamp_min": sf_clamp_min})
    less = []
    if topk_weights is not None:
        less.append("multiplies by the routing weights in its reduction instead")
    if pos_to_expert is not None:
        less.append("also computes padding rows")
    utils = need(FP8_UTILS)
    if use_packed_ue8m0:
        run = lambda: utils.silu_mul_quant_fp8_packed_triton(x, num_per_channels, clamp_limit=swiglu_clamp_value)  # noqa: E731
    elif use_tma_aligned_col_major_sf:
        covers(x.shape[0] % 128 == 0, "column-major scales for multiples of 128 rows")
        column = utils.silu_mul_per_token_group_quant_fp8_colmajor
        run = lambda: column(x, None, round_sf, FLOOR, swiglu_clamp_value, num_per_channels)  # noqa: E731
    else:
        covers(not round_sf and swiglu_clamp_value is None, "row-major scales without rounding and clamping")
        ops = need("vllm._custom_ops")
        run = lambda: ops.silu_and_mul_per_block_quant(x, num_per_channels, FP8)  # noqa: E731
    return PeerCall(run, None, ", ".join(less)) if less else PeerCall(run)


def swiglu_forward(x: Tensor, fmt: str, clamp_value: float | None = None, **rest: Any) -> PeerCall:
    """``_C.silu_and_mul`` or ``_C.silu_and_mul_with_clamp``."""
    covers(x.dtype == torch.bfloat16 and fmt == "bf16", "bf16")
    nothing_else(rest)
    need("vllm._custom_ops")
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)

    def run() -> Tensor:
        if clamp_value is None:
            torch.ops._C.silu_and_mul(out, x)
        else:
            torch.ops._C.silu_and_mul_with_clamp(out, x, clamp_value, 1.0, 0.0)
        return out

    return PeerCall(run)


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    **rest: Any,
) -> PeerCall:
    """``_C.rms_norm`` or ``_C.fused_add_rms_norm``, which writes the sum in place of the residual."""
    covers(x.dim() == 2 and weight is not None, "two dimensions with a weight")
    covers(rest.pop("out_scale", 1.0) == 1.0, "out_scale 1")
    nothing_else(rest)
    ops = need("vllm._custom_ops")
    if residual is None:
        out = torch.empty_like(x)
        return PeerCall(lambda: ops.rms_norm(out, x, weight, eps), lambda _: (out, None, x))
    own_x, own_residual = x.clone(), residual.clone()  # written in place
    return PeerCall(
        lambda: ops.fused_add_rms_norm(own_x, own_residual, weight, eps), lambda _: (own_x, None, own_residual)
    )


def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    residual_out: Tensor | None = None,
    **rest: Any,
) -> PeerCall:
    """``_C.rms_norm_per_block_quant``, or the norm followed by the group cast where it does not apply."""
    covers(x.dim() == 2 and weight is not None and out_scale == 1.0, "two dimensions with a weight and out_scale 1")
    nothing_else(rest)
    ops = need("vllm._custom_ops")
    if not round_sf and num_per_channels in (64, 128) and not with_out_bf16:
        own = residual.clone() if residual is not None else None
        aligned = 4 if use_tma_aligned_col_major_sf else 0
        group = [1, num_per_channels]
        return PeerCall(
            lambda: ops.rms_norm_per_block_quant(
                x, weight, eps, FP8, group, None, own, use_tma_aligned_col_major_sf, aligned
            ),
            lambda cast: (cast, None, None, x if own is None else own),
            "one amax floor lower than ours",
        )
    norm = norm_forward(x, weight, eps, residual)
    normed = norm.result(None)[0] if norm.result else x
    flags = (None, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    cast = per_token_cast(normed, fmt, num_per_channels, *flags)

    def run() -> Any:
        norm.run()
        return cast.run()

    def result(quantised: Any) -> tuple:
        out, _, norm_input = norm.result(None) if norm.result else (x, None, x)
        return quantised, out if with_out_bf16 else None, None, norm_input

    return PeerCall(run, result)


def layout(arguments: dict[str, Any]) -> tuple[bool, bool, bool]:
    """The scale layout of a cast, in the order of the arguments of :func:`per_token_cast`."""
    return arguments["use_tma_aligned_col_major_sf"], arguments["round_sf"], arguments["use_packed_ue8m0"]
