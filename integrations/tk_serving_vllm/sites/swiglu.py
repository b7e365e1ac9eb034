"""SwiGLU of dense layers, of shared experts and, on CUDA, of routed experts, with and without quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.quant.swiglu_forward import swiglu_forward
from tk_serving.quant.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tk_serving_patches import Function, Override, Site
from tk_serving_vllm.sites._calls import offer, on, plan

_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_PLAIN = ("swiglu_forward",)
_QUANTISED = ("swiglu_forward_and_per_token_cast",)

# vLLM's kernel bounds the scale, not the maximum, from below: by 1 / (448 * 512).
_SMALLEST_MAXIMUM = 1 / 512


def _silu_and_mul(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``torch.ops._C.silu_and_mul``: every plain SwiGLU on CUDA, also in compiled graphs."""

    def silu_and_mul(out: Tensor, input: Tensor) -> None:
        if not _into("swiglu", out, input, None):
            original(out, input)

    return silu_and_mul


def _silu_and_mul_with_clamp(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``torch.ops._C.silu_and_mul_with_clamp``: DeepSeek-V4's experts where the rows stay in bfloat16."""

    def silu_and_mul_with_clamp(
        out: Tensor, input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        reason = None if (alpha, beta) == (1.0, 0.0) else f"alpha {alpha} and beta {beta}"
        if not _into("swiglu-clamp", out, input, limit, reason):
            original(out, input, limit, alpha, beta)

    return silu_and_mul_with_clamp


def _into(site: str, out: Tensor, input: Tensor, limit: float | None, reason: str | None = None) -> bool:
    """Run the operator on the rows of ``input`` into ``out``, if it covers the call."""
    reason = reason or _unsupported(input, out)
    rows = input.reshape(-1, input.shape[-1]) if reason else input.view(-1, input.shape[-1])
    call = (rows, _FORMATS.get(out.dtype, ""), None, None, None, limit, None, _rounds(input))
    planned = plan(site, rows.shape[0], swiglu_forward, *call, reason=reason)
    if planned is None:
        return False
    planned.into([out.view(-1, out.shape[-1])])
    return True


def _rounds(x: Tensor) -> bool:
    """vLLM rounds silu to the type of x before it multiplies."""
    return x.dtype == torch.bfloat16


def _unsupported(input: Tensor, out: Tensor) -> str | None:
    if out.dtype not in _FORMATS or input.dtype != out.dtype:
        return f"dtype {out.dtype}"
    if not input.is_contiguous() or not out.is_contiguous():
        return "tensors with gaps"
    return None


def _silu_and_mul_per_block_quant(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``torch.ops._C.silu_and_mul_per_block_quant``: Triton experts, and what vLLM's graph pass fuses."""

    def silu_and_mul_per_block_quant(
        out: Tensor,
        input: Tensor,
        scales: Tensor,
        group_size: int,
        scale_ub: Tensor | None = None,
        is_scale_transposed: bool = False,
    ) -> None:
        call = (input, "e4m3", group_size)
        tokens = input.shape[0]
        options: dict[str, Any] = {
            "use_tma_aligned_col_major_sf": is_scale_transposed,
            "sf_clamp_min": _SMALLEST_MAXIMUM,
        }
        reason = None
        if out.dtype != torch.float8_e4m3fn:
            reason = f"dtype {out.dtype}"
        elif scale_ub is not None:
            reason = "an upper bound for the scales"
        elif is_scale_transposed and input.shape[0] % 4:
            reason = "column-major scales without padding rows"
        planned = plan("swiglu-quant", tokens, swiglu_forward_and_per_token_cast, *call, reason=reason, **options)
        if planned is None:
            original(out, input, scales, group_size, scale_ub, is_scale_transposed)
        else:
            planned.into([out, scales])

    return silu_and_mul_per_block_quant


def _forward_native(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``SiluAndMul`` of the CPU build, which does not call the operator above."""

    def forward_native(x: Tensor) -> Tensor:
        rows = _native("swiglu", x, None)
        return original(x) if rows is None else rows

    return forward_native


def _forward_native_with_clamp(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``SiluAndMulWithClamp`` of the CPU build."""

    def forward_native(self: Any, x: Tensor) -> Tensor:
        plain = (self.alpha, self.beta) == (1.0, 0.0)
        rows = _native("swiglu-clamp", x, self.swiglu_limit, None if plain else f"alpha {self.alpha}, beta {self.beta}")
        return original(self, x) if rows is None else rows

    return forward_native


def _native(site: str, x: Tensor, limit: float | None, reason: str | None = None) -> Tensor | None:
    """[..., H] of [..., 2 H], or None if vLLM's own code runs the call."""
    if x.dtype not in _FORMATS:
        reason = f"dtype {x.dtype}"
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    call = (rows, _FORMATS.get(x.dtype, ""), None, None, None, limit, None, _rounds(x))
    run = offer(site, rows.shape[0], swiglu_forward, *call, reason=reason)
    return None if run is None else run().view(*x.shape[:-1], x.shape[-1] // 2)


_UNTIL = "vLLM keeps a table of implementations for its activation operators."

SITES = (
    Site(
        name="swiglu",
        operators=_PLAIN,
        patches=(Override("_C::silu_and_mul", "CUDA", _silu_and_mul, "(Tensor! result, Tensor input) -> ()"),),
        why="Dense layers, shared experts and unquantised routed experts; f32 inside, rounded where vLLM rounds.",
        how="Replaces the kernel behind vLLM's operator, so that its graph passes still find and fuse the operator; "
        "the option custom_ops=+silu_and_mul, set with the flag, keeps Inductor from bypassing it.",
        until=_UNTIL,
        unsuitable=on("cuda"),
    ),
    Site(
        name="swiglu-clamp",
        operators=_PLAIN,
        patches=(
            Override(
                "_C::silu_and_mul_with_clamp",
                "CUDA",
                _silu_and_mul_with_clamp,
                "(Tensor! result, Tensor input, float limit, float alpha, float beta) -> ()",
            ),
        ),
        why="Shared and routed experts of DeepSeek-V4 that stay in bfloat16; f32 inside, rounded where vLLM rounds.",
        how="Replaces the kernel behind vLLM's operator; other forms than SiLU stay with vLLM.",
        until=_UNTIL,
        unsuitable=on("cuda"),
    ),
    Site(
        name="swiglu-quant",
        operators=_QUANTISED,
        patches=(
            Override(
                "_C::silu_and_mul_per_block_quant",
                "CUDA",
                _silu_and_mul_per_block_quant,
                "(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub, "
                "bool is_scale_transposed) -> ()",
            ),
        ),
        why="FP8 models: SwiGLU and the cast for the second product, in one pass over the rows.",
        how="Keeps vLLM's layout and its lower bound of the scale; leaves scales with an upper bound, int8, and "
        "unpadded column-major scales to vLLM.",
        until=_UNTIL,
        unsuitable=on("cuda"),
    ),
    Site(
        name="swiglu",
        operators=_PLAIN,
        patches=(Function("vllm.model_executor.layers.activation:SiluAndMul.forward_native", _forward_native),),
        why="The same operator as on CUDA, so that the CPU build can try it.",
        how="Runs the torch reference: f32 inside, one rounding, where vLLM rounds the gate first.",
        until=_UNTIL,
        sources={"0.32.0": "075ee4e32ab6e2ab"},
        unsuitable=on("cpu"),
    ),
    Site(
        name="swiglu-clamp",
        operators=_PLAIN,
        patches=(
            Function(
                "vllm.model_executor.layers.activation:SiluAndMulWithClamp.forward_native", _forward_native_with_clamp
            ),
        ),
        why="The same operator as on CUDA, so that the CPU build can try it.",
        how="Runs the torch reference: f32 inside, rounded where vLLM rounds.",
        until=_UNTIL,
        sources={"0.32.0": "0903d08b2049a415"},
        unsuitable=on("cpu"),
    ),
)
