"""A module whose names all exist; calling one says that the real module is absent."""

from collections.abc import Callable
from typing import Any


def names_of(module: str) -> Callable[[str], Callable[..., Any]]:
    """A ``__getattr__`` for the named module."""

    def get(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{module}.{name}: the CPU environment has no {module.partition('.')[0]}")

        absent.__name__ = name
        return absent

    return get
