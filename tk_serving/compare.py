"""How closely two results must agree: the comparison classes of the specification, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Equality:
    """A rule that accepts a result or says what is wrong with it."""

    def difference(self, actual: Tensor, expected: Tensor) -> str | None:
        """None if ``actual`` is acceptable, else a one-line description of the first difference."""
        if actual.dtype != expected.dtype or actual.shape != expected.shape:
            return f"{actual.dtype} {list(actual.shape)} instead of {expected.dtype} {list(expected.shape)}"
        if actual.numel() > 0 and actual.stride() != expected.stride():
            return f"strides {actual.stride()} instead of {expected.stride()}"
        return self._values(actual, expected) if actual.numel() else None

    def _values(self, actual: Tensor, expected: Tensor) -> str | None:
        raise NotImplementedError


@dataclass(frozen=True)
class Bitwise(Equality):
    """[B]: the same bytes. With ``nan_payload=False`` any NaN equals any other NaN of float results."""

    nan_payload: bool = False

    def _values(self, actual: Tensor, expected: Tensor) -> str | None:
        wrong = _bits(actual) != _bits(expected)
        if not self.nan_payload and actual.is_floating_point():
            wrong &= ~(actual.float().isnan() & expected.float().isnan())
        return _first(wrong, actual, expected)


@dataclass(frozen=True)
class Steps(Equality):
    """[B*] across devices: quantised codes may differ by one step in a small share of the elements.

    The reference and the kernel then use different ``exp`` implementations; on one CUDA device they are bit-identical.
    Float results may differ by ``ulp`` units in the last place.
    """

    share: float = 1e-4
    ulp: int = 4

    def _values(self, actual: Tensor, expected: Tensor) -> str | None:
        a, b = _ordered(actual), _ordered(expected)
        apart = (a - b).abs()
        if actual.is_floating_point():
            apart[actual.float().isnan() & expected.float().isnan()] = 0
        # A step between the subnormals of both signs around zero is one step as well.
        limit = 1 if actual.dtype.itemsize == 1 else self.ulp
        wrong = apart > limit
        if bool(wrong.any()):
            return _first(wrong, actual, expected)
        if actual.dtype.itemsize == 1:
            different = int((apart > 0).sum())
            allowed = max(1, int(self.share * apart.numel()))
            if different > allowed:
                return f"{different} of {apart.numel()} codes differ by one step, {allowed} may"
        return None


@dataclass(frozen=True)
class Close(Equality):
    """[T: rtol/atol]: ``|actual - expected| <= atol + rtol * |expected|``; NaN equals NaN."""

    rtol: float
    atol: float

    def _values(self, actual: Tensor, expected: Tensor) -> str | None:
        a, b = actual.double(), expected.double()
        return _first(~torch.isclose(a, b, rtol=self.rtol, atol=self.atol, equal_nan=True), actual, expected)


@dataclass(frozen=True)
class Diff(Equality):
    """[T: diff < limit] with diff(x, y) = 1 - 2 sum(xy) / sum(x^2 + y^2) in float64."""

    limit: float

    def _values(self, actual: Tensor, expected: Tensor) -> str | None:
        value = diff(actual, expected)
        return None if value < self.limit else f"diff {value:.3e} is not below {self.limit:.1e}"


BITWISE = Bitwise()


def diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2) in float64; 0 for two zero tensors."""
    x, y = x.double(), y.double()
    total = (x * x + y * y).sum()
    return 0.0 if total == 0 else float(1 - 2 * (x * y).sum() / total)


def _bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.contiguous().view(integer)


def _ordered(tensor: Tensor) -> Tensor:
    """Integers in the order of the values, one apart for neighbouring floats."""
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    bits = _bits(tensor).to(torch.int64)
    sign = 1 << (8 * tensor.dtype.itemsize - 1)
    bits = bits & (2 * sign - 1)
    return torch.where(bits >= sign, sign - bits, bits)


def _first(wrong: Tensor, actual: Tensor, expected: Tensor) -> str | None:
    count = int(wrong.sum())
    if count == 0:
        return None
    index = tuple(int(i) for i in wrong.nonzero()[0])
    got, want = _show(actual, index), _show(expected, index)
    return f"{count} of {wrong.numel()} elements differ, first at {list(index)}: {got} instead of {want}"


def _show(tensor: Tensor, index: tuple[int, ...]) -> str:
    value = tensor[index]
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        return f"{float(value):g} (code {int(value.view(torch.uint8)):#04x})"
    return f"{value.item()!r}"
