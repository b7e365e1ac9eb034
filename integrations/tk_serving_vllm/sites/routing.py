"""Routing of tokens to experts: ``_compute_routing`` of the routers that DeepSeek models get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.moe.moe_topk_gate import moe_topk_gate
from tk_serving.moe.top2_sum_gate import top2_sum_gate
from tk_serving_patches import Function, Site
from tk_serving_patches.comparing import by_id
from tk_serving_vllm.sites._calls import left_to_engine, offer, on

_OPERATORS = ("top2_sum_gate",)
_BIASED = ("moe_topk_gate",)
_ROUTERS = "vllm.model_executor.layers.fused_moe.router"


def _unsupported(router: Any, router_logits: Tensor) -> str | None:
    """Why the operator does not compute this router's routing, from the router's own settings."""
    if router.scoring_func not in ("sigmoid", "sqrtsoftplus"):
        return f"{router.scoring_func} scores are grouped by their maximum"
    if router.e_score_correction_bias is None:
        return "no correction bias: groups are ranked by their maximum"
    if not router.renormalize:
        return "weights are not normalised"
    groups, experts = router.num_expert_group or 0, router_logits.shape[-1]
    if groups >= experts or (groups and experts % groups):
        return f"{groups} groups of {experts} experts"
    return None


def _gate(router: Any, router_logits: Tensor, mask: Tensor | None = None) -> tuple[Any, ...]:
    """Arguments of the operator for a router."""
    groups = router.num_expert_group or 0
    return (
        _logits(router_logits),
        router.e_score_correction_bias.float(),
        router.top_k,
        router.topk_group if groups else 0,
        groups,
        False,
        0,
        float(router.routed_scaling_factor),
        0,
        1,
        0,
        1,
        router.scoring_func,
        mask,
    )


def _logits(router_logits: Tensor) -> Tensor:
    """In a dtype that the gates read."""
    readable = router_logits.dtype in (torch.float32, torch.bfloat16)
    return (router_logits if readable else router_logits.float()).contiguous()


def _grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``GroupedTopKRouter``, which CUDA uses."""

    def compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        tokens = router_logits.shape[0]
        reason = _unsupported(self, router_logits)
        gate: tuple[Any, ...] = ()
        if reason is None:
            gate = _gate(self, router_logits, _is_token(tokens) if self.skip_padding else None)
        run = offer("routing", tokens, top2_sum_gate, *gate, reason=reason, int32_ids=_int32(indices_type))
        if run is None:
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        ids, weights = run()
        return weights, ids

    return compute_routing


def _int32(indices_type: Any) -> bool:
    """Whether the experts want int32 ids, vLLM's default; the conversion to other types than int64 is the router's."""
    return indices_type is not torch.int64


def _is_token(tokens: int) -> Tensor | None:
    """The mask of rows that are no padding, where vLLM drops padding rows; inverted once for all layers of a pass."""
    from vllm import envs
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not (envs.VLLM_MOE_SKIP_PADDING and is_forward_context_available()):
        return None
    context = get_forward_context()
    if context.is_padding is None:
        return None
    kept = vars(context).get(_KEPT)
    if kept is None or kept[0] is not context.is_padding:
        kept = vars(context)[_KEPT] = (context.is_padding, ~context.is_padding)
    return kept[1][:tokens]


_KEPT = "_tk_serving_is_token"


def _is_image(token_ids: Tensor, first: int) -> Tensor:
    """The mask of rows that stand for parts of an image, computed once for all layers of a pass."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    kept_in = vars(get_forward_context()) if is_forward_context_available() else {}
    place = (token_ids.data_ptr(), token_ids.shape, first)
    kept = kept_in.get(_IMAGES)
    if kept is None or kept[0] != place:
        mask = (token_ids >= first) & (token_ids < first + _IMAGE_IDS)
        kept = kept_in[_IMAGES] = (place, mask)
    return kept[1]


_IMAGES = "_tk_serving_is_image"
_IMAGE_IDS = 5  # token ids from the router's ``image_sentinel_lo`` on


def _has_images(router: Any) -> bool:
    return getattr(router, "bias_vl", None) is not None and router.image_sentinel_lo > 0


def _biased_unsupported(router: Any, input_ids: Tensor | None) -> str | None:
    """Why :func:`moe_topk_gate` does not compute the routing of a router without groups."""
    if router.scoring_func not in ("sigmoid", "sqrtsoftplus"):
        return f"{router.scoring_func} scores"
    if not router.renormalize:
        return "weights are not normalised"
    if _has_images(router) and router._hash_indices_table is not None:
        return "image tokens have a bias, others a table"
    if _has_images(router) and input_ids is None:
        return "image tokens have a bias, and which they are is not said"
    if getattr(router, "num_fused_shared_experts", 0):
        return "shared experts among the routed ones"
    return None


def _biased_gate(
    router: Any, router_logits: Tensor, input_ids: Tensor | None, mask: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the operator for a router without groups: by score and bias, or by a table of token ids."""
    factor = float(router.routed_scaling_factor)
    call = (_logits(router_logits), router.top_k, False, 0, factor, 0, router.scoring_func, mask)
    if router._hash_indices_table is not None:
        return call, {"hash_table": router._hash_indices_table, "token_ids": input_ids}
    bias = router.e_score_correction_bias
    options = {"bias": None if bias is None else bias.float()}
    if input_ids is not None and _has_images(router):
        is_image = _is_image(input_ids, router.image_sentinel_lo)
        options |= {"image_bias": router.bias_vl.float(), "image_token_mask": is_image}
    return call, options


def _biased(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``FusedTopKBiasRouter``: DeepSeek-V4 on CUDA."""

    def compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        tokens = router_logits.shape[0]
        call, options = _biased_gate(self, router_logits, input_ids, _is_token(tokens))
        options["int32_ids"] = _int32(indices_type)
        reason = _biased_unsupported(self, input_ids)
        run = offer("routing-biased", tokens, moe_topk_gate, *call, reason=reason, **options)
        if run is None:
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        ids, weights = run()
        return weights, ids

    return compute_routing


def _cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``CPURouter``, which serves every model on CPU, and which ``torch.compile`` traces."""

    def compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.use_grouped_topk and self.scoring_func == "sqrtsoftplus":
            reason = _biased_unsupported(self, input_ids)
            if reason is None:
                call, options = _biased_gate(self, router_logits, input_ids, None)
                ids, weights = moe_topk_gate(*call, **options)
                return weights, ids.to(indices_type or torch.int32)
            left_to_engine(_BIASED, reason)
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        reason = "no grouped top-k" if not self.use_grouped_topk else _unsupported(self, router_logits)
        if reason is not None:
            left_to_engine(_OPERATORS, reason)
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        ids, weights = top2_sum_gate(*_gate(self, router_logits))
        return weights, ids.to(indices_type or torch.int32)

    return compute_routing


SITES = (
    Site(
        name="routing",
        operators=_OPERATORS,
        patches=(
            Function(
                f"{_ROUTERS}.grouped_topk_router:GroupedTopKRouter._compute_routing",
                _grouped,
                in_order=by_id,
                bound=1e-3,
            ),
        ),
        why="One launch for scores, groups, top-k, normalisation and scaling, padding included.",
        how="Takes sigmoid and sqrtsoftplus routers with a correction bias and normalised weights (V3 and later); V2's "
        "softmax routers, whose groups are ranked by their maximum, stay with vLLM.",
        until="vLLM selects routers by name, so that ours can be registered.",
        sources={"0.33.0": "97aded0c7f4c2c18"},
        unsuitable=on("cuda"),
    ),
    Site(
        name="routing-biased",
        operators=_BIASED,
        patches=(
            Function(
                f"{_ROUTERS}.fused_topk_bias_router:FusedTopKBiasRouter._compute_routing",
                _biased,
                relies_on=(f"{_ROUTERS}.fused_topk_bias_router:fused_topk_bias",),
                in_order=by_id,
                bound=1e-3,
            ),
        ),
        why="One launch for scores, top-k or the look-up of the expert table, normalisation and scaling.",
        how="Takes the routers of V4, those by a table of token ids included, and of V4.1, where image tokens have a "
        "bias of their own; routing inside DeepGEMM's mega MoE stays with vLLM.",
        until="vLLM selects routers by name, so that ours can be registered.",
        sources={"0.33.0": "072ca55b4c88247c"},
        unsuitable=on("cuda"),
    ),
    Site(
        name="routing",
        operators=_OPERATORS + _BIASED,
        patches=(
            Function(
                f"{_ROUTERS}.cpu_router:CPURouter._compute_routing",
                _cpu,
                relies_on=(f"{_ROUTERS}.cpu_router:_grouped_topk", f"{_ROUTERS}.cpu_router:_sqrtsoftplus_bias_topk"),
                in_order=by_id,
                bound=1e-3,
            ),
        ),
        why="The same operator as on CUDA, so that the CPU build can try it.",
        how="As on CUDA; runs the torch reference.",
        until="vLLM selects routers by name, so that ours can be registered.",
        sources={"0.32.0": "ad334066788489da"},
        unsuitable=on("cpu"),
    ),
)
