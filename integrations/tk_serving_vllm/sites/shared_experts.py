"""SwiGLU of DeepSeek-V4's shared experts: with its limit and with the cast for the second product, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tk_serving.quant.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tk_serving_patches import Function, Site
from tk_serving_vllm.sites import _handed_over, _linear
from tk_serving_vllm.sites._calls import left_to_engine, offer, on

_OPERATORS = ("swiglu_forward_and_per_token_cast",)
_SMALLEST_MAXIMUM = 1e-10  # vLLM's lower bound for the maximum of a group


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``DeepseekV4MLP.forward``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        cast = _linear.cast_of_layer(self.down_proj)
        if cast is None:
            left_to_engine(_OPERATORS, "the second product does not quantise its input in groups")
            return original(self, x)
        gate_up, _ = self.gate_up_proj(x)
        tokens, width = gate_up.shape[0], gate_up.shape[-1] // 2
        call = (gate_up, "e4m3", cast.group)
        options: dict[str, Any] = {
            "use_tma_aligned_col_major_sf": cast.column_major,
            "round_sf": cast.round_sf,
            "swiglu_clamp_value": getattr(self.act_fn, "swiglu_limit", None),
            "sf_clamp_min": _SMALLEST_MAXIMUM,
            "round_activation": True,
        }
        run = offer("shared-experts", tokens, swiglu_forward_and_per_token_cast, *call, **options)
        if run is None:
            return self.down_proj(self.act_fn(gate_up))[0]
        data, sf = run()
        rows = gate_up.new_empty(tokens, width)  # stands for the rows, which exist in quantised form only
        _handed_over.give(rows, cast, data, sf, hollow=True)
        return self.down_proj(rows)[0]

    return forward


SITES = (
    Site(
        name="shared-experts",
        operators=_OPERATORS,
        patches=(
            Function(
                "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MLP.forward",
                _forward,
            ),
        ),
        why="One launch instead of two, and no activation in memory; rounded to bfloat16 where vLLM rounds.",
        how="Hands the quantised rows to the second product; layers that are not FP8 in groups stay with vLLM.",
        until="vLLM's fused activations know SwiGLU with a limit.",
        sources={"0.33.0": "42d88f10393524ea"},
        unsuitable=on("cuda"),
    ),
)
