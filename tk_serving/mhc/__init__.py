"""Manifold hyper-connections: several residual streams, mixed before and after every sublayer.

P34-P40 of operators.md are differentiable here; the suffix ``_fwd`` names the operator that records nothing.
"""

from typing import TYPE_CHECKING, Any

from tk_serving.operator import load_family

globals().update(load_family(__name__))

if TYPE_CHECKING:  # the operators are attributes of the package by declaration

    def __getattr__(name: str) -> Any: ...


from tk_serving.mhc.differentiable import *  # noqa: E402
