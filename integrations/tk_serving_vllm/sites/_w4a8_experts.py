"""FP4 experts multiplied by FP8 activations as they are (``TK_SERVING_EXPERTS=w4a8``): at load the weights take the
place of Marlin's in a layout of their own, from then on every step runs here.

Marlin cannot run on them, so that everything is decided when a layer is loaded.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tk_serving.config import settings
from tk_serving.modeling.fp8_experts import w4a8
from tk_serving.modeling.fp8_experts.chain import Shape
from tk_serving_patches import fp4_experts
from tk_serving_patches.fp4_experts import SMALLEST_MAXIMUM
from tk_serving_vllm.sites._calls import local_ids


@dataclass(frozen=True)
class LaidOut:
    """What an instance of MarlinExperts keeps if its layer's weights are tiles.

    The weights are the layer's own parameters, so that reloading them and vLLM's sleep mode find them there.

    Attributes:
        shape: of the layer.
        layer: vLLM's layer.
        beside: the tiles where Marlin's weights stay in the layer, to compare with (``TK_SERVING_COMPARE``).
    """

    shape: Shape
    layer: weakref.ref[Any]
    beside: w4a8.Fp4Tiles | None = None

    def weights(self, w1: Tensor, w2: Tensor) -> w4a8.Fp4Tiles:
        """The weights as the product takes them."""
        if self.beside is not None:
            return self.beside
        layer = self.layer()
        assert layer is not None
        return w4a8.Fp4Tiles.of_words(self.shape, w1, layer.w13_weight_scale, w2, layer.w2_weight_scale)

    def workspace(self, pairs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of vLLM's two workspaces: one holds the results of both products, the other is not used."""
        return (1,), (self.shape.buffer(pairs, w4a8.ALIGNMENT),)

    def run(
        self,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        total: int,
        limit: float | None,
        expert_map: Tensor | None,
        out: Tensor,
        workspace: Tensor | None,
    ) -> None:
        """The experts of one step, into ``out``."""
        w4a8.routed_experts(
            x,
            self.weights(w1, w2),
            local_ids(topk_ids, expert_map).int(),
            topk_weights,
            total=total,
            swiglu_limit=limit,
            sf_clamp_min=SMALLEST_MAXIMUM,
            out=out,
            buffer=None if self.beside is not None else workspace,
        )


def prepare(experts: Any, layer: Any) -> LaidOut | str:
    """Lay a layer's weights out anew in place of Marlin's, or say why Marlin keeps them."""
    config, limit = experts.moe_config, experts.activation_config.clamp_limit
    if getattr(layer, "apply_router_weight_on_input", False):
        return "weights on the input"
    shape = fp4_experts.decide(layer, config.experts_per_token, config.num_experts, config.in_dtype, limit)
    if isinstance(shape, str):
        return shape
    if settings.compare:
        tiles = (*fp4_experts.laid_out(layer, "w13"), *fp4_experts.laid_out(layer, "w2"))
        return LaidOut(shape, weakref.ref(layer), w4a8.Fp4Tiles(*tiles))
    from vllm.model_executor.utils import replace_parameter

    fp4_experts.lay_out(layer, replace_parameter, _in_pool())
    return LaidOut(shape, weakref.ref(layer))


def _in_pool() -> bool:
    """Whether weights are allocated in a memory pool, as for sleep mode."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.model_config.enable_sleep_mode
