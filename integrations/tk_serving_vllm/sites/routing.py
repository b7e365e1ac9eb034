"""Routing of tokens to experts: ``_compute_routing`` of the two routers that grouped top-k models get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.moe.top2_sum_gate import top2_sum_gate
from tk_serving_patches import Function, Site
from tk_serving_vllm.sites._calls import left_to_engine, on, refusal

_OPERATORS = ("top2_sum_gate",)
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
        router_logits.float().contiguous(),
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


def _grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``GroupedTopKRouter``, which CUDA uses."""

    def compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        reason = _unsupported(self, router_logits)
        if reason is None:
            gate = _gate(self, router_logits, _is_token(self, router_logits.shape[0]))
            reason = refusal(top2_sum_gate, *gate)
        if reason is not None:
            left_to_engine(_OPERATORS, reason)
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        ids, weights = top2_sum_gate(*gate)
        return weights, ids.to(indices_type or torch.int32)

    return compute_routing


def _is_token(router: Any, tokens: int) -> Tensor | None:
    """The mask of rows that are no padding, where vLLM asks the router to drop padding rows."""
    from vllm import envs
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not (router.skip_padding and envs.VLLM_MOE_SKIP_PADDING and is_forward_context_available()):
        return None
    is_padding = get_forward_context().is_padding
    return None if is_padding is None else ~is_padding[:tokens]


def _cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``CPURouter``, which serves every model on CPU, and which ``torch.compile`` traces."""

    def compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
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
        patches=(Function(f"{_ROUTERS}.grouped_topk_router:GroupedTopKRouter._compute_routing", _grouped),),
        why="One launch for scores, groups, top-k, normalisation and scaling, padding included.",
        how="Takes sigmoid and sqrtsoftplus routers with a correction bias and normalised weights (V3 and later); V2's "
        "softmax routers, whose groups are ranked by their maximum, stay with vLLM.",
        until="vLLM selects routers by name, so that ours can be registered.",
        sources={"0.33.0": "97aded0c7f4c2c18"},
        unsuitable=on("cuda"),
    ),
    Site(
        name="routing",
        operators=_OPERATORS,
        patches=(
            Function(
                f"{_ROUTERS}.cpu_router:CPURouter._compute_routing",
                _cpu,
                relies_on=(f"{_ROUTERS}.cpu_router:_grouped_topk",),
            ),
        ),
        why="The same operator as on CUDA, so that the CPU build can try it.",
        how="As on CUDA; runs the torch reference.",
        until="vLLM selects routers by name, so that ours can be registered.",
        sources={"0.32.0": "b7fcabb67e1cb578"},
        unsuitable=on("cpu"),
    ),
)
