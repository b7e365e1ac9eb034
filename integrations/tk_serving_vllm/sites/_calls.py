"""What the adapters share: may our operator run this call, and counting the calls that stay with vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_serving.operator import tensors_of
from tk_serving_patches import calls
from tk_serving_patches.calls import left_to_engine

__all__ = ["left_to_engine", "on", "refusal"]


def on(platform: str) -> Callable[[], str | None]:
    """For ``Site.unsuitable``: the site belongs to one platform of vLLM."""

    def unsuitable() -> str | None:
        from vllm.platforms import current_platform

        if current_platform.device_type == platform:
            return None
        return f"for {platform}; this platform is {current_platform.device_type}"

    return unsuitable


def refusal(function: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> str | None:
    """:func:`tk_serving_patches.calls.refusal`, on the device of the arguments unless another is named."""
    device = device or next(tensors_of((args, kwargs))).device
    return calls.refusal(function, device, *args, **kwargs)
