"""Input checks with one message form: ``<operator>: <argument>: expected <what>, got <what>``.

A wrong dtype or kind of object is a ``TypeError``; a wrong shape, stride, value, combination or device a
``ValueError``. Checks look at metadata only, so they also run on fake tensors while ``torch.compile`` traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

Size = int | str | None
"""One entry of a shape pattern: a number, a name (bound on first use, then compared), or None (anything)."""


class Expect:
    """The checks of one operator."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def fail(self, argument: str, expected: str, got: object) -> NoReturn:
        """Raise the ValueError for an argument."""
        raise ValueError(f"{self.operator}: {argument}: expected {expected}, got {got}")

    def that(self, ok: bool, argument: str, expected: str, got: object) -> None:
        """ValueError unless ``ok``."""
        if not ok:
            self.fail(argument, expected, got)

    def kind(self, ok: bool, argument: str, expected: str, got: object) -> None:
        """TypeError unless ``ok``."""
        if not ok:
            raise TypeError(f"{self.operator}: {argument}: expected {expected}, got {got}")

    def dtype(self, argument: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
        if tensor.dtype not in dtypes:
            expected = " or ".join(short(d) for d in dtypes)
            raise TypeError(f"{self.operator}: {argument}: expected dtype {expected}, got {short(tensor.dtype)}")

    def tensor(
        self,
        argument: str,
        tensor: Tensor,
        dtypes: torch.dtype | Sequence[torch.dtype],
        shape: Sequence[Size],
        *,
        contiguous: bool = True,
    ) -> tuple[int, ...]:
        """Check dtype, shape and layout; return the shape.

        ``contiguous=False`` accepts any row stride with a dense last dimension ("row-strided").
        """
        self.dtype(argument, tensor, *((dtypes,) if isinstance(dtypes, torch.dtype) else dtypes))
        self.shape(argument, tensor, shape)
        if contiguous:
            self.that(tensor.is_contiguous(), argument, "a contiguous tensor", f"strides {list(tensor.stride())}")
        else:
            self.row_strided(argument, tensor)
        return tuple(tensor.shape)

    def shape(self, argument: str, tensor: Tensor, shape: Sequence[Size]) -> None:
        ok = tensor.dim() == len(shape)
        for size, wanted in zip(tensor.shape, shape, strict=False):
            ok = ok and (not isinstance(wanted, (int, torch.SymInt)) or size == wanted)
        if not ok:
            wanted = "[" + ", ".join("any" if w is None else str(w) for w in shape) + "]"
            self.fail(argument, f"shape {wanted}", list(tensor.shape))

    def row_strided(self, argument: str, tensor: Tensor) -> None:
        """Dense rows: last stride 1 (or a single column) and, in two dimensions, rows that do not overlap."""
        rows, columns = tensor.stride()[-2:] if tensor.dim() > 1 else (tensor.shape[-1], tensor.stride(-1))
        ok = columns == 1 or tensor.shape[-1] <= 1
        if ok and tensor.dim() > 1 and tensor.shape[-2] > 1:
            ok = rows >= tensor.shape[-1]
        expected = "rows with stride(-1) == 1 that do not overlap"
        self.that(ok or tensor.numel() == 0, argument, expected, f"strides {list(tensor.stride())}")

    def between(self, argument: str, value: int, low: int, high: int) -> None:
        self.that(low <= value <= high, argument, f"{low} to {high}", value)

    def at_least(self, argument: str, value: int, low: int) -> None:
        self.that(value >= low, argument, f"at least {low}", value)

    def positive(self, argument: str, value: float) -> None:
        self.that(value > 0, argument, "a positive number", value)

    def one_of(self, argument: str, value: object, choices: Sequence[object]) -> None:
        self.that(value in choices, argument, " or ".join(repr(c) for c in choices), repr(value))

    def multiple(self, argument: str, value: int, factor: int, what: str = "a size") -> None:
        self.that(value > 0 and value % factor == 0, argument, f"{what} that is a positive multiple of {factor}", value)

    def together(self, **arguments: object) -> None:
        """All of the named arguments are given, or none of them."""
        given = [name for name, value in arguments.items() if value is not None]
        if given and len(given) != len(arguments):
            missing = next(name for name in arguments if name not in given)
            self.fail(missing, f"a value, as {given[0]} is given", None)

    def same_device(self, **tensors: Tensor | None) -> None:
        present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
        for name, tensor in present[1:]:
            first, reference = present[0]
            if tensor.device != reference.device:
                self.fail(name, f"device {reference.device} (that of {first})", tensor.device)

    def same(
        self,
        argument: str,
        tensor: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
    ) -> None:
        """A preallocated tensor is exactly what would have been allocated."""
        self.dtype(argument, tensor, dtype)
        self.shape(argument, tensor, shape)
        if strides is None:
            self.that(tensor.is_contiguous(), argument, "a contiguous tensor", f"strides {list(tensor.stride())}")
        else:
            self.that(
                list(tensor.stride()) == list(strides), argument, f"strides {list(strides)}", list(tensor.stride())
            )


def short(dtype: torch.dtype) -> str:
    """``float8_e4m3fn`` for ``torch.float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")
