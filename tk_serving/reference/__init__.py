"""The torch references under the operators' names: same signatures, same checks, any device."""

import functools
from collections.abc import Callable
from typing import Any

from tk_serving.dispatch import REFERENCE
from tk_serving.operator import operators


def __getattr__(name: str) -> Callable[..., Any]:
    for op in operators():
        if name in (op.name, *op.aliases):
            call = functools.partial(op.call, REFERENCE)
            return functools.update_wrapper(call, op.reference)
    raise AttributeError(f"module 'tk_serving.reference' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for op in operators() for name in (op.name, *op.aliases))
