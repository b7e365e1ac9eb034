"""What replaced calls of every framework share: may an operator run this call, and counting the calls that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_serving import dispatch, kept
from tk_serving.config import settings
from tk_serving.operator import Operator, tensors_of
from tk_serving.plan import Plan


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator that is planned already, so that running it does not plan again."""

    operator: Operator
    plan: Plan
    arguments: tuple

    def __call__(self) -> Any:
        """Run it; the operator's result."""
        return self.operator.planned(self.plan, self.arguments)

    def into(self, outputs: Sequence[Tensor | None]) -> None:
        """Run it with results in tensors of the caller, as :meth:`tk_serving.operator.Operator.into`."""
        self.operator.planned(self.plan.into(outputs), self.arguments)


def ask(function: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> Call | str:
    """The planned call of an operator, or why the framework's own code has to run it.

    CPU tensors run the torch reference, so that everything can be tried and tested without a GPU.

    Args:
        function: the public function of the operator.
        device: where the call would run.
        args: its arguments; meta tensors will do for the answer.
        kwargs: its keyword arguments.
    """
    op: Operator = function.operator  # type: ignore[attr-defined]
    bound = op.bind(*args, **kwargs)
    try:
        plan = kept.plan(op, bound)
    except (TypeError, ValueError) as error:
        return str(error)
    if device.type != "cpu" or op.name in settings.disable:
        decision = dispatch.decide(op, plan, device)
        if decision.implementation != dispatch.KERNEL:
            return decision.reason
    return Call(op, plan, bound)


def refusal(function: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> str | None:
    """Why the framework's own code has to run a call of an operator, or None; arguments as of :func:`ask`."""
    answer = ask(function, device, *args, **kwargs)
    return answer if isinstance(answer, str) else None


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
