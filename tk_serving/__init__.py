"""Faster kernels for serving DeepSeek-style models, in TileLang.

Importing the package imports neither TileLang nor a serving engine and creates no CUDA context: kernels are loaded
on their first launch.
"""

import importlib
import pkgutil
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"tk_serving.{name}")
    raise AttributeError(f"module 'tk_serving' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES])
