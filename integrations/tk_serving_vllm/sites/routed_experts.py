"""Routed experts of the CPU build: the whole chain from mapping to reduction around per-expert matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tk_serving_patches import Function, Site
from tk_serving_patches.experts import OPERATORS, experts, weights_refusal
from tk_serving_vllm.sites._calls import left_to_engine, on

_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts"


def _unsupported(self: Any, layer: Any) -> str | None:
    from vllm.model_executor.kernels.linear.zentorch_utils import is_zentorch_moe_supported
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if layer.activation != MoEActivation.SILU:
        return f"activation {layer.activation.value}"
    if self.moe_config.has_bias:
        return "experts with a bias"
    if self.moe_config.moe_parallel_config.use_ep:
        return "expert parallelism on CPU"
    if is_zentorch_moe_supported(layer):
        return "zentorch runs the experts"
    return weights_refusal(layer.w13_weight, layer.w2_weight)


def _process_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bind ``apply`` of each instance together with its weights: vLLM's own code wants them packed, ours does not."""

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        reason = _unsupported(self, layer)
        if reason is None:
            self.apply = functools.partial(_apply, self.quant_config.gemm1_clamp_limit)
        else:
            original(self, layer)
            self.apply = functools.partial(_apply_engine, self.apply, reason)

    return process_weights_after_loading


def _apply(
    limit: float | None,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *_: Any,
    apply_router_weight_on_input: bool,
    **__: Any,
) -> None:
    weights = None if apply_router_weight_on_input else topk_weights
    output.copy_(experts(hidden_states, w1, w2, topk_ids, weights, limit))


def _apply_engine(original: Callable[..., Any], reason: str, *args: Any, **kwargs: Any) -> None:
    left_to_engine(OPERATORS, reason)
    original(*args, **kwargs)


SITES = (
    Site(
        name="routed-experts",
        operators=OPERATORS,
        patches=(
            Function(
                f"{_EXPERTS}.process_weights_after_loading",
                _process_weights,
                relies_on=(f"{_EXPERTS}.apply",),
                comparable=False,
            ),
        ),
        why="The CPU build shows the complete chain of operators in a real server, on any machine.",
        how="Keeps the weights as loaded, and runs mapping, expansion, one matrix product for each expert, SwiGLU and "
        "weighted reduction. Layers that it does not cover have their weights packed and run vLLM's code.",
        until="never on CPU; on CUDA the grouped product is DeepGEMM's or Triton's (see the other sites).",
        sources={"0.32.0": "66c7ff60805b2ba8"},
        unsuitable=on("cpu"),
    ),
)
