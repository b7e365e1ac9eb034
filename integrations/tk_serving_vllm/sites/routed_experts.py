"""Routed experts of the CPU build: the whole chain from mapping to reduction around per-expert matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.moe.expand_to_fused import expand_to_fused
from tk_serving.moe.get_fused_mapping import get_fused_mapping
from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving.quant.swiglu_forward import swiglu_forward
from tk_serving_patches import Function, Site
from tk_serving_vllm.sites._calls import left_to_engine, on, refusal

_OPERATORS = ("get_fused_mapping", "expand_to_fused", "swiglu_forward", "reduce_fused")
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts"
_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}

_LIBRARY = torch.library.Library("tk_serving_vllm", "DEF")
_LIBRARY.define("grouped_product(Tensor x, Tensor weight, Tensor expert_end) -> Tensor")


def _grouped_product(x: Tensor, weight: Tensor, expert_end: Tensor) -> Tensor:
    """``x[rows of e] @ weight[e].T`` for every expert e; the rows of an expert end at ``expert_end[e]``."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(expert_end.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
        start = end
    out[start:] = 0  # rows of no expert
    return out


_LIBRARY.impl("grouped_product", _grouped_product, "CPU")
torch.library.register_fake(
    "tk_serving_vllm::grouped_product", lambda x, w, end: x.new_empty(x.shape[0], w.shape[1]), lib=_LIBRARY
)


def experts(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor | None) -> Tensor:
    """Routed experts of one layer.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gate above up; ``w2``: [E, H, I].
        topk_ids: [T, K], negative for none.
        topk_weights: f32 [T, K], or None for weights of 1.

    Returns:
        [T, H].
    """
    tokens, topk = topk_ids.shape
    pos_to_expert, _, _, token_topk_to_pos, _, expert_end, _, _ = get_fused_mapping(
        topk_ids.long(), w13.shape[0], tokens * topk, 1, force_no_sync=True
    )
    grouped_product = torch.ops.tk_serving_vllm.grouped_product
    rows = grouped_product(expand_to_fused(x, token_topk_to_pos, pos_to_expert), w13, expert_end)
    rows = grouped_product(swiglu_forward(rows, _FORMATS[x.dtype]), w2, expert_end)
    return reduce_fused(rows, topk_weights, token_topk_to_pos)


def _unsupported(self: Any, layer: Any) -> str | None:
    from vllm.model_executor.kernels.linear.zentorch_utils import is_zentorch_moe_supported
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    w13, w2 = layer.w13_weight, layer.w2_weight
    if layer.activation != MoEActivation.SILU:
        return f"activation {layer.activation.value}"
    if self.moe_config.has_bias:
        return "experts with a bias"
    if self.quant_config.gemm1_clamp_limit is not None:
        return "a limit on the activations"
    if self.moe_config.moe_parallel_config.use_ep:
        return "expert parallelism on CPU"
    if w13.dtype not in _FORMATS:
        return f"weights of dtype {w13.dtype}"
    if is_zentorch_moe_supported(layer):
        return "zentorch runs the experts"
    rows = torch.empty(1, w13.shape[1], dtype=w13.dtype, device="meta")
    place = torch.empty(1, 1, dtype=torch.int32, device="meta")
    return refusal(swiglu_forward, rows, _FORMATS[w13.dtype], device=w13.device) or refusal(
        reduce_fused, torch.empty(1, w2.shape[1], dtype=w2.dtype, device="meta"), None, place, device=w13.device
    )


def _process_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bind ``apply`` of each instance together with its weights: vLLM's own code wants them packed, ours does not."""

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        reason = _unsupported(self, layer)
        if reason is None:
            self.apply = _apply
        else:
            original(self, layer)
            self.apply = functools.partial(_apply_engine, self.apply, reason)

    return process_weights_after_loading


def _apply(
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
    output.copy_(experts(hidden_states, w1, w2, topk_ids, weights))


def _apply_engine(original: Callable[..., Any], reason: str, *args: Any, **kwargs: Any) -> None:
    left_to_engine(_OPERATORS, reason)
    original(*args, **kwargs)


SITES = (
    Site(
        name="routed-experts",
        operators=_OPERATORS,
        patches=(
            Function(f"{_EXPERTS}.process_weights_after_loading", _process_weights, relies_on=(f"{_EXPERTS}.apply",)),
        ),
        why="The CPU build shows the complete chain of operators in a real server, on any machine.",
        how="Keeps the weights as loaded, and runs mapping, expansion, one matrix product for each expert, SwiGLU and "
        "weighted reduction. Layers that it does not cover have their weights packed and run vLLM's code.",
        until="never on CPU; on CUDA the grouped product is DeepGEMM's or Triton's (see the other sites).",
        sources={"0.32.0": "66c7ff60805b2ba8"},
        unsuitable=on("cpu"),
    ),
)
