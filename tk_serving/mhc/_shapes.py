"""Checks, layouts and sizes that the mHC operators share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.layout import WORD, address, aligned
from tk_serving.operator import Existing, Out

MULT = 4
"""Residual streams, ``hc_mult`` of the checkpoints."""
MIXES = MULT * (2 + MULT)
"""Mixing coefficients of a token: pre, post and a MULT x MULT combination."""
HIDDEN_MULTIPLE = 64

BF16, F32 = torch.bfloat16, torch.float32


def lead(
    expect: Expect,
    argument: str,
    tensor: Tensor,
    dtype: torch.dtype,
    *tail: int | str,
    like: Sequence[int] | None = None,
    contiguous: bool = True,
) -> tuple[int, ...]:
    """Check a tensor [..., *tail] and return its leading sizes, any number of them; ``like`` prescribes them."""
    expect.dtype(argument, tensor, dtype)
    shape = tuple(tensor.shape)
    found = shape[: max(len(shape) - len(tail), 0)]
    ok = len(shape) >= len(tail) and (like is None or found == tuple(like))
    for size, wanted in zip(shape[len(found) :], tail, strict=False):
        ok = ok and (size == wanted if isinstance(wanted, (int, torch.SymInt)) else size > 0)
    if not ok:
        sizes = ["..."] if like is None else [str(size) for size in like]
        expect.fail(argument, f"shape [{', '.join([*sizes, *map(str, tail)])}]", list(shape))
    if contiguous:
        expect.that(tensor.is_contiguous(), argument, "a contiguous tensor", f"strides {list(tensor.stride())}")
    return found


def hidden(expect: Expect, argument: str, tensor: Tensor) -> int:
    """The hidden size: the last size of a tensor, a positive multiple of 64."""
    size = tensor.shape[-1] if tensor.dim() else 0
    expect.multiple(argument, size, HIDDEN_MULTIPLE, "a hidden size")
    return size


def mult(expect: Expect, argument: str, value: int) -> None:
    """Only four streams have kernels, and no checkpoint has another number."""
    expect.that(value == MULT, argument, f"{MULT}", value)


def result(
    expect: Expect, argument: str, out: Tensor | None, shape: Sequence[int], dtype: torch.dtype
) -> Out | Existing:
    """The slot of a result that the caller may own."""
    if out is None:
        return Out(tuple(shape), dtype)
    expect.same(argument, out, tuple(shape), dtype)
    expect.that(aligned(out.view(-1)), argument, "a 16-byte aligned tensor", "a misaligned one")
    return Existing(argument)


def owned(number: int) -> Callable[..., Any]:
    """``finish`` of an operator whose last ``number`` arguments are its results, where the caller owns them."""

    def finish(results: Any, *args: Any) -> Any:
        if number == 1:
            return results if args[-1] is None else args[-1]
        given = args[len(args) - number :]
        return tuple(fresh if mine is None else mine for fresh, mine in zip(results, given, strict=True))

    return finish


def count(sizes: Sequence[int]) -> int:
    """Tokens of leading sizes."""
    return math.prod(sizes)


def rows(tensor: Tensor, *tail: int) -> Tensor:
    """[..., *tail] as contiguous [tokens, *tail] readable in 16-byte words; a copy where that takes one."""
    if tensor.is_contiguous() and tensor.data_ptr() % WORD == 0:
        return tensor.view(-1, *tail)
    flat = tensor.reshape(-1, *tail).contiguous()
    return flat if aligned(flat.view(-1)) else flat.clone()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors share memory; False where they have none (fake tensors)."""
    first, second = address(a), address(b)
    if not first or not second:
        return False
    return first < second + b.numel() * b.itemsize and second < first + a.numel() * a.itemsize
