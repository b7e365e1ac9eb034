"""What the adapters share: may our operator run this call, and counting the calls that stay with vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_serving import dispatch
from tk_serving.operator import tensors_of


def on(platform: str) -> Callable[[], str | None]:
    """For ``Site.unsuitable``: the site belongs to one platform of vLLM."""

    def unsuitable() -> str | None:
        from vllm.platforms import current_platform

        if current_platform.device_type == platform:
            return None
        return f"for {platform}; this platform is {current_platform.device_type}"

    return unsuitable


def refusal(function: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> str | None:
    """Why vLLM's own code has to run a call of an operator, or None.

    On CPU the torch references of the operators run: the CPU build of vLLM is the place to try and test the plugin.

    Args:
        function: the public function of the operator.
        args: its arguments; meta tensors will do.
        device: where the call would run, if not on the device of the arguments.
        kwargs: its keyword arguments.
    """
    op = function.operator
    bound = op.bind(*args, **kwargs)
    device = device or next(tensors_of(bound)).device
    try:
        plan = op.plan(*bound)
    except (TypeError, ValueError) as error:
        return str(error)
    if device.type == "cpu":
        return None
    decision = dispatch.decide(op, plan, device)
    return None if decision.implementation == dispatch.KERNEL else decision.reason


@torch.compiler.assume_constant_result
def left_to_engine(operators: tuple[str, ...], reason: str) -> bool:
    """Count a call that vLLM's own code runs; in code that ``torch.compile`` traces, once for each trace."""
    for name in operators:
        dispatch.count(name, dispatch.Decision(dispatch.ENGINE, reason))
    return True
