"""Packed FP4 codes as numbers, in plain torch (operators.md P16)."""

import torch
from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.quant.formats import decode_e2m1

_expect = Expect("unpack_from_e2m1fn_x2")


def unpack_from_e2m1fn_x2(x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of packed e2m1 codes, without scales. Any device, no kernel.

    Args:
        x: int8 or uint8 [..., C], C at least 1: two codes in a byte, the first in the low nibble.
        out_dtype: of the result; every value is exact in any floating-point type of eight bits or more.

    Returns:
        [..., 2 C]; the sign of zero is kept.

    Raises:
        TypeError: wrong dtype.
        ValueError: no dimension, or an empty last one.
    """
    _expect.kind(isinstance(x, Tensor), "x", "a torch.Tensor", type(x).__name__)
    _expect.dtype("x", x, torch.int8, torch.uint8)
    _expect.kind(isinstance(out_dtype, torch.dtype), "out_dtype", "torch.dtype", type(out_dtype).__name__)
    _expect.that(x.dim() >= 1 and x.shape[-1] >= 1, "x", "shape [..., C] with C at least 1", list(x.shape))
    return decode_e2m1(x).to(out_dtype)
