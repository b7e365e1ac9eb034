"""FP4 experts multiplied by FP8 activations as they are (``TK_SERVING_EXPERTS=w4a8``), on Hopper.

At load the weights take the place of Marlin's in a layout of their own; Marlin cannot run on them, so that everything
is decided then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_serving.config import settings
from tk_serving.modeling.fp8_experts import w4a8
from tk_serving.modeling.fp8_experts.chain import Shape
from tk_serving_patches import Function, Site, fp4_experts
from tk_serving_sglang.sites._calls import left_to_engine, on

_METHOD = "sglang.srt.layers.quantization.mxfp4_marlin_moe:Mxfp4MarlinMoEMethod"
_UTILITIES = "sglang.srt.layers.quantization.marlin_utils_fp4"
_RELIES_ON = (  # the layout of the weights, and what Marlin is told
    f"{_UTILITIES}:prepare_moe_mxfp4_layer_for_marlin",
    f"{_UTILITIES}:_repack_moe_fp4_weight_for_marlin",
    f"{_UTILITIES}:_permute_moe_fp4_scales_for_marlin",
    f"{_UTILITIES}:mxfp4_marlin_process_scales",
    "sglang.srt.layers.quantization.mxfp4_marlin_moe:build_marlin_moe_quant_info",
    "sglang.srt.layers.moe.moe_runner.marlin:fused_experts_none_to_marlin",
)
_STATE = "_tk_serving_fp4"


def _unsupported(method: Any, layer: Any) -> str | None:
    """Why a layer stays with Marlin, before its weights are looked at."""
    from sglang.srt.runtime_context import get_exec

    config = method.runner.config
    if settings.experts != "w4a8":
        return f"TK_SERVING_EXPERTS={settings.experts}"
    if config.activation != "silu" or not config.is_gated or config.gemm1_alpha is not None:
        return f"activation {config.activation}" + ("" if config.gemm1_alpha is None else " with an alpha")
    if getattr(layer, "w13_weight_bias", None) is not None or getattr(layer, "w2_weight_bias", None) is not None:
        return "experts with a bias"
    if method.runner.lora_enabled:
        return "LoRA"
    if config.no_combine or config.apply_router_weight_on_input:
        return "results of experts that are not added up, or weights on the input"
    if method.hidden_pad:
        return "a padded hidden size"
    if get_exec().moe.enable_eplb:
        return "SGLang moves experts between ranks (EPLB)"
    return None


def _limit(method: Any) -> float | None:
    return method.runner.config.swiglu_limit or None


def _process_weights_after_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        original(self, layer)
        if getattr(layer, "_dsv4_mxfp4_backend", None) == "marlin":
            setattr(layer, _STATE, _prepare(self, layer))

    return process_weights_after_loading


def _prepare(method: Any, layer: Any) -> Shape | str:
    """Lay a layer's weights out anew in place of Marlin's, or say why Marlin keeps them."""
    reason = _unsupported(method, layer)
    if reason is not None:
        return reason
    dtype = getattr(layer, "orig_dtype", torch.bfloat16)
    found = fp4_experts.decide(layer, layer.top_k, layer.num_experts, dtype, _limit(method))
    if isinstance(found, Shape):
        fp4_experts.lay_out(layer, _put)
    return found


def _put(layer: Any, name: str, data: torch.Tensor) -> None:
    setattr(layer, name, torch.nn.Parameter(data, requires_grad=False))


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers import zero_copy_context
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        state = getattr(layer, _STATE, "loaded before the site was applied")
        if isinstance(state, str):
            left_to_engine(w4a8.OPERATORS, state)
            return original(self, layer, dispatch_output)
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        out = w4a8.routed_experts(
            x,
            w4a8.Fp4Tiles.of_words(
                state, layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale
            ),
            topk.topk_ids.int(),  # of this rank's experts, -1 for others
            topk.topk_weights.float(),
            total=layer.num_experts,
            swiglu_limit=_limit(self),
            sf_clamp_min=fp4_experts.SMALLEST_MAXIMUM,
            out=zero_copy_context.get_moe_output(x),
        )
        return StandardCombineInput(hidden_states=out)

    return apply


def _not_hopper() -> str | None:
    elsewhere = on("cuda")()
    if elsewhere:
        return elsewhere
    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"compute capability {major}.{minor}: for Hopper, which has no FP4 products"


SITES = (
    Site(
        name="fp4-experts",
        operators=w4a8.OPERATORS,
        patches=(
            Function(
                f"{_METHOD}.process_weights_after_loading",
                _process_weights_after_loading,
                relies_on=_RELIES_ON,
                comparable=False,
            ),
            Function(f"{_METHOD}.apply", _apply, comparable=False),
        ),
        why="On Hopper Marlin multiplies FP4 experts in 16 bits; the FP8 tensor cores do several times as much, and "
        "the model was trained for FP8 activations.",
        how="With TK_SERVING_EXPERTS=w4a8 and --moe-runner-backend marlin the layer's weights are laid out anew in "
        "place of Marlin's when they are loaded, and every step multiplies them by FP8 activations. Biases, LoRA, "
        "EPLB, other activations and scales that span more than FP8 holds stay with Marlin.",
        until="SGLang has FP8 x FP4 experts on Hopper as fast.",
        sources={"0.5.23": "073ef7e5b9acd300"},
        unsuitable=_not_hopper,
    ),
)
