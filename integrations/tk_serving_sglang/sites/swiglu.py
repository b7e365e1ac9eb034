"""SwiGLU of dense layers, of shared experts and, on CUDA, of routed experts, with and without quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tk_serving.quant.swiglu_forward import swiglu_forward
from tk_serving.quant.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tk_serving_patches import Function, Site
from tk_serving_patches.experts import FORMATS
from tk_serving_sglang.sites._calls import on, plan, scale_layout

_PLAIN = ("swiglu_forward",)
_QUANTISED = ("swiglu_forward_and_per_token_cast",)
_SMALLEST_MAXIMUM = 1e-10  # SGLang's lower bound for the maximum of a group
_ACTIVATIONS = "sglang.kernels.ops.activation"


def _unsupported(input: Tensor, out: Tensor | None) -> str | None:
    if input.dtype not in FORMATS or (out is not None and out.dtype != input.dtype):
        return f"dtype {input.dtype if out is None else out.dtype}"
    if not input.is_contiguous() or (out is not None and not out.is_contiguous()):
        return "tensors with gaps"
    return None


def _plain(
    input: Tensor, out: Tensor | None, reason: str | None, limit: float | None = None, site: str = "swiglu"
) -> Tensor | None:
    """The result, or None where SGLang's code has to run."""
    reason = reason or _unsupported(input, out)
    width = input.shape[-1]
    rows = input.view(-1, width) if reason is None else input
    form = FORMATS.get(input.dtype, "bf16")
    run = plan(site, _PLAIN, swiglu_forward, rows, form, clamp_value=limit, reason=reason)
    if run is None:
        return None
    if out is None:
        return run().view(*input.shape[:-1], width // 2)
    run.into([out.view(-1, width // 2)])
    return out


def _silu_and_mul(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function behind ``SiluAndMul`` and the unquantised experts."""

    def silu_and_mul(
        input: Tensor,
        out: Tensor | None = None,
        expert_ids: Tensor | None = None,
        expert_step: int = 1,
        *,
        sorted_token_ids: Tensor | None = None,
        num_tokens_post_padded: Tensor | None = None,
        num_valid_tokens: int = 0,
    ) -> Tensor:
        reason = None if expert_ids is None else "rows that the experts of this rank do not read"
        result = _plain(input, out, reason)
        if result is not None:
            return result
        return original(
            input,
            out,
            expert_ids,
            expert_step,
            sorted_token_ids=sorted_token_ids,
            num_tokens_post_padded=num_tokens_post_padded,
            num_valid_tokens=num_valid_tokens,
        )

    return silu_and_mul


def _silu_and_mul_clamp(original: Callable[..., Any]) -> Callable[..., Any]:
    """For V4: the gate bounded above, the other half on both sides."""

    def silu_and_mul_clamp(input: Tensor, output: Tensor, swiglu_limit: float) -> None:
        if _plain(input, output, None, float(swiglu_limit), "swiglu-clamp") is None:
            original(input, output, swiglu_limit)

    return silu_and_mul_clamp


def _contig_post_quant(original: Callable[..., Any]) -> Callable[..., Any]:
    """For shared experts of V4, and for DeepGEMM's contiguous experts."""

    def silu_and_mul_contig_post_quant(
        input: Tensor,
        output: Tensor,
        output_scale: Tensor,
        quant_group_size: int,
        scale_ue8m0: bool = False,
        transposed: bool = False,
        swiglu_limit: float | None = None,
        swizzle: bool = False,
    ) -> None:
        options = scale_layout(output_scale, input.shape[0], scale_ue8m0)
        reason = "swizzled columns" if swizzle else options if isinstance(options, str) else None
        call = (input, "e4m3", quant_group_size)
        more = {"swiglu_clamp_value": swiglu_limit, "sf_clamp_min": _SMALLEST_MAXIMUM}
        if not isinstance(options, str):
            more |= options
        run = plan("swiglu-quant", _QUANTISED, swiglu_forward_and_per_token_cast, *call, reason=reason, **more)
        if run is not None:
            run.into([output, output_scale])
            return
        original(input, output, output_scale, quant_group_size, scale_ue8m0, transposed, swiglu_limit, swizzle=swizzle)

    return silu_and_mul_contig_post_quant


def _forward_native(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``SiluAndMul`` on a CPU, which does not call the function above."""

    def forward_native(self: Any, x: Tensor) -> Tensor:
        result = _plain(x.contiguous(), None, None)
        return original(self, x) if result is None else result

    return forward_native


_UNTIL = "SiluAndMul and its relatives declare a plugin backend."

SITES = (
    Site(
        name="swiglu",
        operators=_PLAIN,
        patches=(Function(f"{_ACTIVATIONS}.activation:silu_and_mul", _silu_and_mul),),
        why="Dense layers, shared experts and unquantised routed experts; f32 inside, one rounding.",
        how="Replaces the function that all of them call; calls that skip rows of other ranks stay with SGLang.",
        until=_UNTIL,
        sources={"0.5.23": "03aa6783ec37fe0c"},
        unsuitable=on("cuda"),
    ),
    Site(
        name="swiglu",
        operators=_PLAIN,
        patches=(Function("sglang.srt.layers.activation:SiluAndMul.forward_native", _forward_native),),
        why="The same operator as on CUDA, so that a CPU can try it.",
        how="Runs the torch reference: f32 inside, one rounding, where SGLang rounds the gate first.",
        until=_UNTIL,
        sources={"0.5.23": "59fac2e08f124e84"},
        unsuitable=on("cpu"),
    ),
    Site(
        name="swiglu-clamp",
        operators=_PLAIN,
        patches=(Function(f"{_ACTIVATIONS}.silu_and_mul_clamp:silu_and_mul_clamp", _silu_and_mul_clamp),),
        why="V4's bounded SwiGLU with f32 inside and IEEE division.",
        how="As swiglu, with the limit.",
        until=_UNTIL,
        sources={"0.5.23": "51f5724d31bb38b8"},
        unsuitable=on("cuda"),
    ),
    Site(
        name="swiglu-quant",
        operators=_QUANTISED,
        patches=(Function(f"{_ACTIVATIONS}.silu_and_mul_clamp:silu_and_mul_contig_post_quant", _contig_post_quant),),
        why="SwiGLU and the cast for the second product, in one pass over the rows.",
        how="Keeps SGLang's layout and its lower bound of the maximum; swizzled columns stay with SGLang.",
        until=_UNTIL,
        sources={"0.5.23": "266deaffb6bcd4c2"},
        unsuitable=on("cuda"),
    ),
)
