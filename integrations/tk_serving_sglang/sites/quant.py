"""The FP8 cast in front of linear layers and experts, with and without SwiGLU before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.quant.per_token_cast import per_token_cast
from tk_serving.quant.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tk_serving_patches import Function, Site
from tk_serving_sglang.sites._calls import Call, asked, left_to_engine, on, scale_layout

_OPERATORS = ("per_token_cast", "swiglu_forward_and_per_token_cast")
_SMALLEST_MAXIMUM = 1e-10  # SGLang's lower bound for the maximum of a group


def _layout(column_major: bool, aligned: bool, powers_of_two: bool, rows: int) -> dict[str, Any] | str:
    """Options for the layout that SGLang asks for, or why there are none."""
    if not column_major:
        return {"round_sf": powers_of_two}
    if not aligned and rows % 4:
        return "column-major scales without padding rows"
    return {
        "use_tma_aligned_col_major_sf": True,
        "round_sf": powers_of_two,
        "use_packed_ue8m0": powers_of_two,
    }


def _per_token_group_quant(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``sglang_per_token_group_quant_fp8``: linear layers, MoE runners, attention of V4."""

    def sglang_per_token_group_quant_fp8(
        x: Tensor,
        group_size: int,
        eps: float = _SMALLEST_MAXIMUM,
        column_major_scales: bool = False,
        scale_tma_aligned: bool = False,
        scale_ue8m0: bool = False,
        fuse_silu_and_mul: bool = False,
        masked_m: Tensor | None = None,
        *,
        output_q: Tensor | None = None,
        output_s: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] | str
        if masked_m is not None or x.dim() != 2:
            options = "rows of every expert in a buffer of its own" if masked_m is not None else f"{x.dim()} dimensions"
        elif output_q is not None and output_q.dtype != torch.float8_e4m3fn:
            options = f"dtype {output_q.dtype}"
        elif output_s is not None:
            options = scale_layout(output_s, x.shape[0], scale_ue8m0)
        else:
            options = _layout(column_major_scales, scale_tma_aligned, scale_ue8m0, x.shape[0])
        function: Any = swiglu_forward_and_per_token_cast if fuse_silu_and_mul else per_token_cast
        answer: Call | str
        if isinstance(options, str):
            answer = options
        elif (output_q is None) != (output_s is None):
            answer = "one of the two results is given"
        else:
            if fuse_silu_and_mul:
                options["sf_clamp_min"] = eps
            answer = asked("quant", function, x, "e4m3", group_size, **options)
        if not isinstance(answer, str):
            if output_q is None or output_s is None:
                return answer()
            try:
                answer.into([output_q, output_s])
            except ValueError as error:
                answer = str(error)
            else:
                return output_q, output_s
        left_to_engine((function.operator.name,), answer)
        return original(
            x,
            group_size,
            eps,
            column_major_scales,
            scale_tma_aligned,
            scale_ue8m0,
            fuse_silu_and_mul,
            masked_m,
            output_q=output_q,
            output_s=output_s,
        )

    return sglang_per_token_group_quant_fp8


_QUANT = "sglang.kernels.ops.quantization.fp8_kernel"

SITES = (
    Site(
        name="quant",
        operators=_OPERATORS,
        patches=(
            Function(
                f"{_QUANT}:sglang_per_token_group_quant_fp8",
                _per_token_group_quant,
                relies_on=(f"{_QUANT}:create_per_token_group_quant_fp8_output_scale",),
            ),
        ),
        why="One cast for every layout of the scales, written as the product that follows reads them.",
        how="Takes [T, H] in groups of 16 to 128 columns, with float32, power-of-two and packed UE8M0 scales; masked "
        "buffers stay with SGLang. The plain cast takes a maximum below 1e-4 as 1e-4, SGLang 1e-10.",
        until="SGLang's FP8 cast is an operator of its registry with a plugin backend.",
        sources={"0.5.23": "60e342e233b7cab5"},
        unsuitable=on("cuda"),
    ),
)
