from typing import TYPE_CHECKING, Any

from tk_serving.operator import load_family

globals().update(load_family(__name__))

if TYPE_CHECKING:  # the operators are attributes of the package by declaration

    def __getattr__(name: str) -> Any: ...
