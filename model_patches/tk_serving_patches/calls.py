"""What replaced calls of every framework share: may an operator run this call, and counting the calls that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_serving import dispatch
from tk_serving.config import settings
from tk_serving.operator import tensors_of


def refusal(function: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> str | None:
    """Why the framework's own code has to run a call of an operator, or None.

    CPU tensors run the torch reference, so that everything can be tried and tested without a GPU.

    Args:
        function: the public function of the operator.
        device: where the call would run.
        args: its arguments; meta tensors will do.
        kwargs: its keyword arguments.
    """
    op = function.operator  # type: ignore[attr-defined]
    bound = op.bind(*args, **kwargs)
    try:
        plan = op.plan(*bound)
    except (TypeError, ValueError) as error:
        return str(error)
    if device.type == "cpu" and op.name not in settings.disable:
        return None
    decision = dispatch.decide(op, plan, device)
    return None if decision.implementation == dispatch.KERNEL else decision.reason


def refusal_here(function: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> str | None:
    """:func:`refusal` on the device of the arguments, unless another is named."""
    device = device or next(tensors_of((args, kwargs))).device
    return refusal(function, device, *args, **kwargs)


@torch.compiler.assume_constant_result
def left_to_engine(operators: tuple[str, ...], reason: str) -> bool:
    """Count a call that the framework's own code runs; in code that ``torch.compile`` traces, once for each trace."""
    for name in operators:
        dispatch.count(name, dispatch.Decision(dispatch.ENGINE, reason))
    return True
