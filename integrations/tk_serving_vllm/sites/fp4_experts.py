"""Routed experts with FP4 weights on Hopper's FP8 tensor cores.

With ``w4a8`` every step runs there (:mod:`tk_serving_vllm.sites._w4a8_experts`), with ``upcast`` and ``resident`` those
with many tokens do.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_serving.config import settings
from tk_serving.modeling.fp8_experts import Layer, Layers, Policy, alignment, routed_experts, w4a8
from tk_serving.modeling.fp8_experts.chain import OPERATORS, calls
from tk_serving.operator import Quantized
from tk_serving_patches import Function, Site
from tk_serving_patches.fp4_experts import SMALLEST_MAXIMUM, weights_of
from tk_serving_vllm.sites import _w4a8_experts
from tk_serving_vllm.sites._calls import left_to_engine, local_ids, on, refusal
from tk_serving_vllm.sites._w4a8_experts import LaidOut

_MARLIN = "vllm.model_executor.layers.fused_moe.experts.marlin_moe"
_METHOD = "vllm.model_executor.layers.quantization.mxfp4:Mxfp4MoEMethod"
_UTILITIES = "vllm.model_executor.layers.quantization.utils"
_REPACKING = (  # the layout of the weights
    f"{_UTILITIES}.marlin_utils_fp4:prepare_moe_mxfp4_layer_for_marlin",
    f"{_UTILITIES}.marlin_utils_fp4:_repack_marlin_experts",
    f"{_UTILITIES}.marlin_utils_fp4:mxfp4_marlin_process_scales",
    f"{_UTILITIES}.marlin_utils:marlin_permute_scales",
)
_SIZES = (  # of the problem, which vLLM reads off the weights, and of its workspaces
    f"{_UTILITIES}.marlin_utils:marlin_moe_intermediate_size",
    f"{_MARLIN}:MarlinExpertsBase.moe_problem_size",
    "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEKernelModularImpl._allocate_buffers",
)
_STATE = "_tk_serving_fp8"

log = logging.getLogger(__name__)

_models: weakref.WeakValueDictionary[tuple[torch.device, str], Layers] = weakref.WeakValueDictionary()
"""The layers that share a workspace; the experts of these layers keep it alive."""


@dataclass(frozen=True)
class _Taken:
    """What an instance of MarlinExperts keeps if its layer can run in FP8; otherwise it keeps the reason, a string."""

    layers: Layers
    layer: Layer

    def total(self, global_num_experts: int) -> int:
        """Experts of all ranks; -1 stands for those of this rank."""
        return self.layer.fp4.shape[0] if global_num_experts == -1 else global_num_experts


def product(x: Quantized, weight: Quantized, out: Tensor, pos_to_expert: Tensor) -> None:
    """DeepGEMM's grouped FP8 product; blocks of rows whose first expert is negative are skipped."""
    from vllm.utils import deep_gemm

    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(x, weight, out, pos_to_expert)


def _unsupported(experts: Any) -> str | None:
    """Why a layer keeps W4A16 for good, before its weights are looked at."""
    from vllm import envs

    config, activation = experts.moe_config, experts.activation_config
    if settings.experts == "stock":
        return "TK_SERVING_EXPERTS=stock"
    if not experts.quant_config.use_mxfp4_w4a16 or experts.input_dtype is not None:
        return "not FP4 weights with 16-bit activations"
    if config.activation.value != "silu" or (activation.alpha, activation.beta) != (1.0, 0.0):
        return f"activation {config.activation.value} with alpha {activation.alpha} and beta {activation.beta}"
    if config.has_bias:
        return "experts with a bias"
    if config.is_lora_enabled:
        return "LoRA"
    if config.moe_parallel_config.enable_eplb:
        return "vLLM moves experts between ranks (EPLB)"
    if envs.VLLM_BATCH_INVARIANT:
        return "results must not depend on the number of tokens"
    return None


def _setup_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    """After vLLM repacked a layer's weights for Marlin: find out whether FP8 holds them, and prepare for it."""

    def _setup_kernel(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

        original(self, layer, *args, **kwargs)
        experts = getattr(self.moe_kernel, "fused_experts", None)
        if type(experts) is MarlinExperts:
            state = _unsupported(experts) or _prepare(experts, layer)
            setattr(experts, _STATE, state)
            _note(state)

    return _setup_kernel


def _prepare(experts: Any, layer: Any) -> LaidOut | _Taken | str:
    if settings.experts == "w4a8":
        return _w4a8_experts.prepare(experts, layer)
    weights = weights_of(layer)
    key = (weights.w13.device, settings.experts)
    layers = _models.get(key)
    if layers is None:
        layers = _models[key] = Layers(settings.experts)
    added = layers.add(weights)
    return added if isinstance(added, str) else _Taken(layers, added)


@functools.lru_cache(maxsize=64)
def _say(message: str) -> None:
    log.info("fp4-experts: %s", message)


def _note(state: LaidOut | _Taken | str) -> None:
    """In the log, once: that layers run in FP8, or why they do not."""
    if not isinstance(state, str):
        _say(f"layers of this worker run with TK_SERVING_EXPERTS={settings.experts}")
    elif settings.experts != "stock":
        _say(f"layers of this worker stay with Marlin: {state}")


@functools.lru_cache(maxsize=4096)
def _refusal(device: torch.device, *shape: Any) -> str | None:
    """The first refusal of the operators of the chain, from shapes alone."""
    found = (refusal(function, *args, device=device, **kwargs) for function, args, kwargs in calls(*shape))
    return next((reason for reason in found if reason is not None), None)


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> Any:
        state: LaidOut | _Taken | str = getattr(self, _STATE, "loaded before the site was applied")
        tokens, topk = topk_ids.shape
        reason: str | None
        limit = self.activation_config.clamp_limit
        if isinstance(state, LaidOut):
            if apply_router_weight_on_input or self._uses_post_gemm2_hook(tokens):
                raise RuntimeError("fp4-experts: w4a8: weights on the input, or a hook behind the second product")
            total = state.shape.experts if global_num_experts == -1 else global_num_experts
            state.run(hidden_states, w1, w2, topk_ids, topk_weights, total, limit, expert_map, output, workspace2)
            return None
        if isinstance(state, str):
            reason = state
        elif apply_router_weight_on_input:
            reason = "weights on the input"
        elif self._uses_post_gemm2_hook(tokens):
            reason = "a hook behind the second product"
        else:
            reason = _decide(state, topk_ids, global_num_experts, hidden_states, limit)
        if reason is not None or isinstance(state, str):
            left_to_engine(w4a8.OPERATORS if settings.experts == "w4a8" else OPERATORS, reason or "")
            return original(
                self,
                output,
                hidden_states,
                w1,
                w2,
                topk_weights,
                topk_ids,
                activation,
                global_num_experts,
                expert_map,
                a1q_scale,
                a2_scale,
                workspace13,
                workspace2,
                expert_tokens_meta,
                apply_router_weight_on_input,
            )

        ids = local_ids(topk_ids, expert_map)
        total = state.total(global_num_experts)
        if not (state.layers.warm or (ids.is_cuda and torch.cuda.is_current_stream_capturing())):
            # The first step is the profiling run, with as many tokens as there ever are: later ones find kernels built.
            for n in _policy().steps(tokens, topk, total):
                _run(state.layer, hidden_states[:n], ids[:n], topk_weights[:n], total, limit)
            state.layers.warm = True
        _run(state.layer, hidden_states, ids, topk_weights, total, limit, output)

    return apply


def _workspace_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours need one workspace, and rows of padding in it."""

    def workspace_shapes(
        self: Any,
        M: int,
        N: int,
        K: int,
        topk: int,
        *rest: Any,
        **kwargs: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        state = getattr(self, _STATE, None)
        if not isinstance(state, LaidOut) or state.beside is not None:
            return original(self, M, N, K, topk, *rest, **kwargs)
        return *state.workspace(M * topk), (M, K)

    return workspace_shapes


def _run(
    layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, total: int, limit: float | None, out: Tensor | None = None
) -> None:
    from vllm.utils import deep_gemm

    rows = alignment(ids.shape[0], ids.shape[1], total)
    fp8 = layer.acquire()
    with deep_gemm.mk_alignment_scope(rows):
        routed_experts(
            x,
            fp8,
            ids,
            weights,
            product,
            alignment=rows,
            swiglu_limit=limit,
            sf_clamp_min=SMALLEST_MAXIMUM,
            out=out,
            after_products=layer.release,
        )


def _policy() -> Policy:
    return Policy(settings.experts, settings.experts_min_tokens)


def _decide(state: _Taken, topk_ids: Tensor, global_num_experts: int, x: Tensor, limit: float | None) -> str | None:
    policy, total = _policy(), state.total(global_num_experts)
    tokens, topk = topk_ids.shape
    if not policy.takes(tokens, topk, total):
        return f"fewer than {policy.threshold(topk, total)} tokens"
    experts, width, hidden = state.layer.fp4.shape
    rows = alignment(tokens, topk, total)
    ids = torch.int32 if topk_ids.dtype == torch.int32 else torch.int64
    return _refusal(x.device, tokens, topk, experts, width, hidden, x.dtype, rows, limit, SMALLEST_MAXIMUM, ids)


def _not_hopper() -> str | None:
    elsewhere = on("cuda")()
    if elsewhere:
        return elsewhere
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is not None and capability[0] != 9:
        return f"compute capability {capability[0]}.{capability[1]}: for Hopper, which has no FP4 products"
    if settings.experts in ("w4a8", "stock"):
        return None
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    return None if is_deep_gemm_supported() else "DeepGEMM is not available"


SITES = (
    Site(
        name="fp4-experts",
        operators=("grouped_gemm_fp8_fp4", *OPERATORS),
        patches=(
            Function(
                f"{_METHOD}._setup_kernel",
                _setup_kernel,
                relies_on=(f"{_METHOD}._build_moe_kernel", *_REPACKING),
                comparable=False,
            ),
            Function(
                f"{_MARLIN}:MarlinExperts.workspace_shapes", _workspace_shapes, relies_on=_SIZES, comparable=False
            ),
            Function(
                f"{_MARLIN}:MarlinExperts.apply",
                _apply,
                relies_on=(f"{_MARLIN}:fused_marlin_moe",),
                bound=0.1,  # activations are cast to FP8 twice
            ),
        ),
        why="On Hopper vLLM multiplies FP4 experts in 16 bits; the FP8 tensor cores do several times as much, and "
        "the model was trained for FP8 activations.",
        how="With w4a8 the layer's weights are laid out anew in place of Marlin's when they are loaded, and every step "
        "multiplies them by FP8 activations. With upcast, from a measured number of tokens on, they are upcast from "
        "Marlin's layout, without a change of value, into FP8 blocks in a workspace that all layers share, and "
        "DeepGEMM multiplies. Biases, LoRA, EPLB, other activations and scales that span more than FP8 holds stay with "
        "Marlin.",
        until="vLLM has FP8 x FP4 experts on Hopper as fast.",
        sources={"0.33.0": "1f4dc8bf2404f4ae"},
        unsuitable=_not_hopper,
    ),
)
