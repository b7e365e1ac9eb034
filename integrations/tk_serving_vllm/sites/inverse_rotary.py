"""Attention's result of V4 before its two output projections: the rotation of queries and keys undone, and FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tk_serving.operator import Quantized
from tk_serving.transform.apply_rotary_and_per_token_cast import GROUP, apply_rotary_and_per_token_cast
from tk_serving_patches import Function, Site, warm
from tk_serving_vllm.sites._calls import offer, on

_SITE = "inverse-rotary"
_FUSED = "vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant"


def _fused_inv_rope_fp8_quant(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``fused_inv_rope_fp8_quant``."""

    def fused_inv_rope_fp8_quant(
        o: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        n_groups: int,
        heads_per_group: int,
        nope_dim: int = 448,
        rope_dim: int = 64,
        quant_group_size: int = 128,
        tma_aligned_scales: bool = False,
        quantize: bool = True,
    ) -> Quantized:
        reason = None
        if not quantize:
            reason = "results in bfloat16"
        elif tma_aligned_scales:
            reason = "packed scales"
        elif quant_group_size != GROUP:
            reason = f"groups of {quant_group_size} channels"
        elif o.shape[1:] != (n_groups * heads_per_group, nope_dim + rope_dim):
            reason = f"{list(o.shape[1:])} for {n_groups} x {heads_per_group} heads of {nope_dim} + {rope_dim}"
        elif cos_sin_cache.shape[1:] != (rope_dim,):
            reason = f"a cache of shape {list(cos_sin_cache.shape)} for {rope_dim} channels"
        call = (o, cos_sin_cache, positions, n_groups, True)
        run = offer(_SITE, o.shape[0], apply_rotary_and_per_token_cast, *call, reason=reason)
        if run is None:
            shape = (n_groups, heads_per_group, nope_dim, rope_dim, quant_group_size)
            return original(o, positions, cos_sin_cache, *shape, tma_aligned_scales, quantize)
        if not torch.compiler.is_compiling():  # padded heads are cut off: not all of memory, so not resized otherwise
            warm.note_made((_SITE, o.shape[1:], n_groups), functools.partial(_of_tokens, *_forms(*call[:4])))
        return run()

    return fused_inv_rope_fp8_quant


def _forms(o: Tensor, cos_sin_cache: Tensor, positions: Tensor, n_groups: int) -> tuple[Any, ...]:
    return o.shape[1:], o.stride(), cos_sin_cache.shape, positions.dtype, n_groups


def _of_tokens(
    heads: torch.Size, strides: tuple[int, ...], cache: torch.Size, dtype: torch.dtype, n_groups: int, tokens: int
) -> Iterator[tuple[Any, tuple, dict[str, Any]]]:
    """The call for so many tokens, on meta tensors."""
    o = torch.empty_strided((tokens, *heads), strides, dtype=torch.bfloat16, device="meta")
    positions = torch.empty(tokens, dtype=dtype, device="meta")
    call = (o, torch.empty(cache, device="meta"), positions, n_groups, True)
    yield apply_rotary_and_per_token_cast, call, {}


SITES = (
    Site(
        name=_SITE,
        operators=("apply_rotary_and_per_token_cast",),
        patches=(
            Function(
                f"{_FUSED}:fused_inv_rope_fp8_quant",
                _fused_inv_rope_fp8_quant,
                relies_on=(
                    f"{_FUSED}:_fused_inv_rope_fp8_quant_kernel_impl",
                    f"{_FUSED}:FusedInvRopeFP8QuantKernel",
                    "vllm.models.deepseek_v4.nvidia.ops.o_proj:deep_gemm_fp8_o_proj",
                ),
            ),
        ),
        why="Wide loads, and the angles of a token read once for many heads; vLLM's Triton kernel has a program of one "
        "warp for each head.",
        how="The same rounding and the same layout, padding rows included. Packed scales (Blackwell) and results in "
        "bfloat16 stay with vLLM. Values that are no numbers stay such, where vLLM's kernel gives numbers.",
        until="vLLM's kernel reaches the memory's bandwidth.",
        sources={"0.33.0": "d2fa476ebbb53d94"},
        unsuitable=on("cuda"),
    ),
)
