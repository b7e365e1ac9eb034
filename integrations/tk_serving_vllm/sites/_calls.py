"""What the adapters share: may our operator run this call, and counting the calls that stay with vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.operator import tensors_of
from tk_serving_patches import warm
from tk_serving_patches.calls import Call, ask, left_to_engine
from tk_serving_patches.calls import refusal_here as refusal
from tk_serving_vllm import table

__all__ = ["left_to_engine", "local_ids", "offer", "on", "plan", "refusal"]


def on(platform: str) -> Callable[[], str | None]:
    """For ``Site.unsuitable``: the site belongs to one platform of vLLM."""

    def unsuitable() -> str | None:
        from vllm.platforms import current_platform

        if current_platform.device_type == platform:
            return None
        return f"for {platform}; this platform is {current_platform.device_type}"

    return unsuitable


def local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """The ids of this rank's experts, int32 or int64 as vLLM has them; experts of other ranks become -1."""
    ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.long()
    if expert_map is None:
        return ids
    return torch.where(ids < 0, ids, expert_map[ids.clamp(min=0).long()].to(ids.dtype))


def offer(
    site: str, tokens: int, function: Any, *args: Any, reason: str | None = None, **kwargs: Any
) -> Callable[[], Any] | None:
    """The call of a site, to be run by our operator, or None: vLLM's own code runs it, which is counted with why.

    Args:
        site: the name of the site.
        tokens: of the call, for the table of measurements.
        function: the operator.
        args: its arguments.
        reason: what the adapter itself has against it.
        kwargs: further arguments of the operator.
    """
    if torch.compiler.is_compiling():  # there are no tensors to look at: only ``reason`` counts
        if reason is None:
            return functools.partial(function, *args, **kwargs)
        left_to_engine((function.operator.name,), reason)
        return None
    return plan(site, tokens, function, *args, reason=reason, **kwargs)


def plan(site: str, tokens: int, function: Any, *args: Any, reason: str | None = None, **kwargs: Any) -> Call | None:
    """As :func:`offer`, for code that ``torch.compile`` never traces; such a call may write into vLLM's tensors."""
    answer: Call | str = reason or table.slower(site, tokens) or ""
    if not answer:
        answer = ask(function, next(tensors_of((args, kwargs))).device, *args, **kwargs)
    if isinstance(answer, str):
        left_to_engine((function.operator.name,), answer)
        return None
    warm.note(function, tokens, args, kwargs)
    return answer
