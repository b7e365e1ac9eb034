"""The FP8 cast in groups of channels: of the input of linear layers, and wherever vLLM calls its operator for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.quant.per_token_cast import per_token_cast
from tk_serving_patches import Function, Override, Site
from tk_serving_vllm.sites import _handed_over, _linear
from tk_serving_vllm.sites._calls import on, plan

_OPERATORS = ("per_token_cast",)


def _forward_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``QuantFP8.forward_cuda``."""

    def forward_cuda(
        self: Any,
        x: Tensor,
        scale: Tensor | None = None,
        scale_ub: Tensor | None = None,
        use_triton: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():  # in the graph vLLM's operator is called, which is the site group-cast
            return original(self, x, scale, scale_ub, use_triton)
        cast = _linear.cast_of(self)
        if cast is not None:
            taken = _handed_over.take(x, cast)
            if taken is not None:
                return taken
        reason = None
        if cast is None or x.dim() != 2 or x.dtype != torch.bfloat16:
            reason = "a cast in groups of 32 to 128 with float32 scales is expected of bfloat16 [T, H]"
        group, column_major, round_sf = (cast.group, cast.column_major, cast.round_sf) if cast else (128, True, False)
        call = (x, "e4m3", group, None, column_major, round_sf)
        run = plan("linear-input", x.shape[0], per_token_cast, *call, reason=reason)
        return original(self, x, scale, scale_ub, use_triton) if run is None else run()

    setattr(forward_cuda, _linear.TAKES, True)
    return forward_cuda


def _group_quant(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``torch.ops._C.per_token_group_fp8_quant``: every other cast in groups, into tensors of the caller."""

    def per_token_group_fp8_quant(
        input: Tensor,
        output_q: Tensor,
        output_s: Tensor,
        group_size: int,
        eps: float,
        fp8_min: float,
        fp8_max: float,
        scale_ue8m0: bool,
        transposed: bool = False,
        tma_aligned: bool = False,
    ) -> None:
        reason = _unsupported(input, output_q, group_size, transposed)
        call = (input, "e4m3", group_size, None, transposed, scale_ue8m0)
        planned = plan("group-cast", input.shape[0], per_token_cast, *call, reason=reason)
        if planned is None:
            given = (group_size, eps, fp8_min, fp8_max, scale_ue8m0, transposed, tma_aligned)
            original(input, output_q, output_s, *given)
        else:
            planned.into([output_q, output_s])

    return per_token_group_fp8_quant


def _group_quant_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``torch.ops._C.per_token_group_fp8_quant_packed``: four power-of-two scales in a word, for Blackwell."""

    def per_token_group_fp8_quant_packed(
        input: Tensor,
        output_q: Tensor,
        output_s_packed: Tensor,
        group_size: int,
        eps: float,
        fp8_min: float,
        fp8_max: float,
    ) -> None:
        call = (input, "e4m3", group_size, None, True, True, True)
        reason = _unsupported(input, output_q, group_size, True)
        planned = plan("group-cast", input.shape[0], per_token_cast, *call, reason=reason)
        if planned is None:
            original(input, output_q, output_s_packed, group_size, eps, fp8_min, fp8_max)
        else:
            planned.into([output_q, output_s_packed])

    return per_token_group_fp8_quant_packed


def _unsupported(input: Tensor, output: Tensor, group_size: int, transposed: bool) -> str | None:
    if input.dim() != 2 or input.dtype not in (torch.bfloat16, torch.float32) or not input.is_contiguous():
        return f"{input.dtype} of shape {list(input.shape)}"
    if output.dtype != torch.float8_e4m3fn or group_size not in (32, 64, 128):
        return f"groups of {group_size} to {output.dtype}"
    if transposed and input.shape[0] % 4:
        return "column-major scales without padding rows"
    return None


SITES = (
    Site(
        name="group-cast",
        operators=_OPERATORS,
        patches=(
            Override(
                "_C::per_token_group_fp8_quant",
                "CUDA",
                _group_quant,
                "(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float fp8_min, "
                "float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
            ),
            Override(
                "_C::per_token_group_fp8_quant_packed",
                "CUDA",
                _group_quant_packed,
                "(Tensor input, Tensor! output_q, Tensor! output_s_packed, int group_size, float eps, float fp8_min, "
                "float fp8_max) -> ()",
            ),
        ),
        why="The cast before the experts, and in compiled models before linear layers that Inductor leaves to vLLM.",
        how="Writes the layout that vLLM allocated: row-major, column-major or packed, the last two where the columns "
        "need no padding. The smallest scale is that of linear-input.",
        until="vLLM keeps a table of implementations for its quantisation operators.",
        unsuitable=on("cuda"),
    ),
    Site(
        name="linear-input",
        operators=_OPERATORS,
        patches=(
            Function(
                "vllm.model_executor.layers.quantization.input_quant_fp8:QuantFP8.forward_cuda",
                _forward_cuda,
                relies_on=(
                    "vllm.model_executor.layers.quantization.utils.fp8_utils:per_token_group_quant_fp8",
                    "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel:"
                    "Fp8BlockScaledMMLinearKernel.apply_weights",
                ),
            ),
        ),
        why="Fewer launches where the operator before has quantised the rows; a faster cast elsewhere.",
        how="Takes what was handed over, else casts group by group into row-major or TMA-aligned column-major float32 "
        "scales; packed scales, static and per-token ones stay with vLLM. Groups whose maximum is below 1e-4 get the "
        "scale of 1e-4 (vLLM: 1e-10), which e4m3's subnormals make up for. Compiled models call vLLM's operator.",
        until="vLLM's linear layers take quantised input in groups of 128 (QuantizedActivation).",
        sources={"0.33.0": "3b4d7adf2f939536"},
        unsuitable=on("cuda"),
    ),
)
