"""What differs between the serving engines: a module for each, found by its name.

A module has ``LABEL`` (the engine's name for people), ``PACKAGE`` (what must be importable), ``SERVER`` (the module
that starts the server), ``EXPECTED`` (operators that must have run, by device), and the functions ``arguments``,
``environment`` and ``complete``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = ("vllm", "sglang")


def find(name: str) -> ModuleType:
    """The module of an engine."""
    return importlib.import_module(f"{__name__}.{name}")
