"""What the replaced forwards share: may an operator run this call, and counting the calls that stay."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tk_serving.config import settings
from tk_serving.operator import tensors_of
from tk_serving_patches import calls

_left: Counter[tuple[str, str]] = Counter()


@dataclass(frozen=True)
class Seam:
    """A part of a layer that operators take over: the name of its sites, and the operators."""

    name: str
    operators: tuple[str, ...]

    def leave(self, reason: str) -> None:
        """Count a call that transformers' own code runs."""
        _leave(self.name, self.operators, reason)


def left() -> dict[tuple[str, str], int]:
    """Calls left to transformers in this process, by name of the site and reason."""
    return dict(_left)


@torch.compiler.assume_constant_result
def _leave(name: str, operators: tuple[str, ...], reason: str) -> bool:
    # In code that torch.compile traces this runs once for each trace.
    _left[name, reason] += 1
    return calls.left_to_engine(operators, reason)


def verdict(check: Callable[..., str | None]) -> Callable[..., str | None]:
    """Make a check remember its answers, and a constant for ``torch.compile``.

    Its arguments are devices, dtypes, numbers and strings; its answer is the reason of a refusal, or None. Answers are
    forgotten with the settings that they were given under.
    """

    @functools.cache
    def answer(_: tuple, *args: Any) -> str | None:
        return check(*args)

    @functools.wraps(check)
    def ask(*args: Any) -> str | None:
        return answer((settings.jit, settings.disable, settings.cpu), *args)

    return torch.compiler.assume_constant_result(ask)


def refusal(function: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> str | None:
    """:func:`tk_serving_patches.calls.refusal` of meta tensors: a verdict depends on shapes and dtypes alone."""
    assert next(tensors_of((args, kwargs))).device.type == "meta"
    return calls.refusal(function, device, *args, **kwargs)


def rows_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear layer answers for these rows."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def is_silu(activation: Any) -> bool:
    """An activation module of transformers computes x * sigmoid(x)."""
    return isinstance(activation, torch.nn.SiLU) or type(activation).__name__ == "SiLUActivation"
