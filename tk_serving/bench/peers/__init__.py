"""Implementations of others that ours are compared with: one file for each engine, one function for each operator.

A contract names its peers (``peers=("vllm", "sglang:other_name")``); the function is looked up here when a benchmark
runs. It takes the operator's public arguments by keyword, prepares whatever the engine would have prepared, and returns
what is timed: a function without arguments, or a :class:`PeerCall`. It raises :class:`PeerUnavailableError` with the
reason where the engine is absent or has nothing for these arguments. An engine file imports its engine inside these
functions only.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

REFERENCE, COMPILED = "reference", "compile"
TORCH = (REFERENCE, COMPILED)
"""Peers that every operator has: its torch reference, eager and through ``torch.compile``."""


class PeerUnavailableError(Exception):
    """The peer cannot run this call; the message says why."""


@dataclass(frozen=True)
class PeerCall:
    """A prepared call of a peer.

    Attributes:
        run: what is timed.
        result: turns what ``run`` returned into the operator's public result, outside the timed region; None where the
            results cannot be compared, and then ``note`` says why.
        note: what the peer does more or less than the operator.
    """

    run: Callable[[], Any]
    result: Callable[[Any], Any] | None = lambda value: value
    note: str = ""


def engines() -> list[str]:
    """Names of the engine files."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))


def engine_of(peer: str) -> str:
    """``vllm`` for ``vllm`` and ``vllm:function``."""
    return peer.partition(":")[0]


def prepare(peer: str, operator: str, arguments: dict[str, Any]) -> PeerCall:
    """The call of a declared peer on these arguments.

    Raises:
        PeerUnavailableError: with the reason.
    """
    engine, _, function = peer.partition(":")
    if engine not in engines():
        raise PeerUnavailableError(f"{engine} is none of the peers {', '.join(engines())}")
    make = getattr(engine_module(engine), function or operator, None)
    if make is None:
        raise PeerUnavailableError(f"{engine} has no {function or operator}")
    made = make(**arguments)
    return made if isinstance(made, PeerCall) else PeerCall(made)


def engine_module(engine: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{engine}")


def need(*modules: str) -> Any:
    """The first of the named modules that can be imported; a failure is remembered, as it can take seconds.

    Raises:
        PeerUnavailableError: none of them; the message is that of the first.
    """
    found = [_import(module) for module in modules]
    for module in found:
        if isinstance(module, ModuleType):
            return module
    raise PeerUnavailableError(str(found[0]))


def covers(condition: object, what: str) -> None:
    """Raise PeerUnavailableError unless the condition holds."""
    if not condition:
        raise PeerUnavailableError(f"covers {what} only")


def nothing_else(rest: dict[str, Any]) -> None:
    """Raise PeerUnavailableError if an optional argument that the peer does not know is in use."""
    used = sorted(name for name, value in rest.items() if not any(value is unused for unused in (None, False, 0)))
    if used:
        raise PeerUnavailableError(f"knows no {', '.join(used)}")


@functools.cache
def _import(module: str) -> ModuleType | str:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (error.name == module or module.startswith(f"{error.name}.")):
            return f"{error.name} is not installed"
        return f"{module} does not import: {error}"
    except Exception as error:
        return f"{module} does not import: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
