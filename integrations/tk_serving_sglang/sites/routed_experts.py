"""Routed experts on a CPU: the whole chain from mapping to reduction around per-expert matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tk_serving_patches import Function, Site
from tk_serving_patches.experts import OPERATORS, experts, weights_refusal
from tk_serving_sglang.sites._calls import left_to_engine, on


def _unsupported(layer: Any, config: Any) -> str | None:
    if config.activation != "silu" or config.gemm1_alpha is not None:
        return f"activation {config.activation}" + ("" if config.gemm1_alpha is None else " with an alpha")
    if config.apply_router_weight_on_input:
        return "weights on the input"
    if getattr(layer, "w13_weight_bias", None) is not None or getattr(layer, "w2_weight_bias", None) is not None:
        return "experts with a bias"
    if layer.num_experts != layer.w13_weight.shape[0]:
        return "expert parallelism on CPU"
    return weights_refusal(layer.w13_weight, layer.w2_weight)


def _moe_forward_native(original: Callable[..., Any]) -> Callable[..., Any]:
    def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
        reason = _unsupported(layer, moe_runner_config)
        if reason is not None:
            left_to_engine(OPERATORS, reason)
            return original(layer, x, topk_output, moe_runner_config)
        weights, ids, _ = topk_output
        return experts(x, layer.w13_weight, layer.w2_weight, ids, weights.float())

    return moe_forward_native


SITES = (
    Site(
        name="routed-experts",
        operators=OPERATORS,
        patches=(Function("sglang.srt.layers.moe.fused_moe_native:moe_forward_native", _moe_forward_native),),
        why="Shows the complete chain of operators in a real server, on any machine.",
        how="Runs mapping, expansion, one matrix product for each expert, SwiGLU and weighted reduction.",
        until="never on CPU; on CUDA the grouped product is DeepGEMM's or Triton's (see the other sites).",
        sources={"0.5.23": "b80efec60ecade5a"},
        unsuitable=on("cpu"),
    ),
)
