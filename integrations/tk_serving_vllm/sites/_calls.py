"""What the adapters share: may our operator run this call, and counting the calls that stay with vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_serving_patches import warm
from tk_serving_patches.calls import left_to_engine
from tk_serving_patches.calls import refusal_here as refusal
from tk_serving_vllm import table

__all__ = ["left_to_engine", "on", "refusal", "runs"]


def on(platform: str) -> Callable[[], str | None]:
    """For ``Site.unsuitable``: the site belongs to one platform of vLLM."""

    def unsuitable() -> str | None:
        from vllm.platforms import current_platform

        if current_platform.device_type == platform:
            return None
        return f"for {platform}; this platform is {current_platform.device_type}"

    return unsuitable


def runs(site: str, tokens: int, function: Any, *args: Any, reason: str | None = None, **kwargs: Any) -> bool:
    """Whether an operator runs this call of a site; if not, vLLM's own code does, and the call is counted with why.

    In code that ``torch.compile`` traces there are no tensors to look at: there only ``reason`` counts.

    Args:
        site: the name of the site.
        tokens: of the call, for the table of measurements.
        function: the operator.
        args: its arguments.
        reason: what the adapter itself has against it.
        kwargs: further arguments of the operator.
    """
    if reason is None and not torch.compiler.is_compiling():
        reason = table.slower(site, tokens) or refusal(function, *args, **kwargs)
    if reason is None:
        warm.note(function, tokens, args, kwargs)
        return True
    left_to_engine((function.operator.name,), reason)
    return False
