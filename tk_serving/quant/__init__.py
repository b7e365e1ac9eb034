"""Casts to and from FP8, FP4 and E5M6, SwiGLU and RMSNorm with or without a cast, and scales for matrix products."""

from typing import TYPE_CHECKING, Any

from tk_serving.operator import load_family

globals().update(load_family(__name__))

if TYPE_CHECKING:  # the operators are attributes of the package by declaration

    def __getattr__(name: str) -> Any: ...


from tk_serving.quant.batched_transpose_weight_sf import batched_transpose_weight_sf  # noqa: E402, F401
from tk_serving.quant.unpack_from_e2m1fn_x2 import unpack_from_e2m1fn_x2  # noqa: E402, F401
