"""Whether an implementation computes what the reference computes, decided before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE, Close, Equality, Steps
from tk_serving.operator import Operator, tensors_of

EQUAL, CLOSE, DIFFERENT = "equal", "close", "different"


@dataclass(frozen=True)
class Agreement:
    """``kind``: ``equal`` by the operator's own rule, ``close`` (rounding apart), ``different``; None: not compared."""

    kind: str | None
    difference: str = ""


class Roughly(Equality):
    """What rounding alone explains: codes one step apart in at most 5 % of the elements, floats within 1 %."""

    def _values(self, actual: Tensor, expected: Tensor) -> str | None:
        if not expected.is_floating_point():
            rule: Equality = Steps(share=0.0, ulp=0)
        elif expected.dtype.itemsize == 1:
            rule = Steps(share=0.05)
        else:
            scale = expected.float().abs().nan_to_num(0, 0, 0).max().item()
            rule = Close(rtol=1e-2, atol=1e-2 * min(scale, 1.0))
        return rule.difference(actual, expected)


def written(op: Operator, args: tuple, result: Any) -> list[Any]:
    """Everything a call delivers: the parts of its result, then the arguments it writes to; None where absent."""
    values = dict(zip(op.signature.parameters, args, strict=True))
    pairs = {parameter.name for parameter in op.parameters if parameter.pair}
    delivered = parts(op, result)
    if op.unspecified is not None:
        op.unspecified(delivered, *args)
    for name in op.mutates:
        tensors = list(tensors_of(values[name]))
        width = 2 if name in pairs else max(1, len(tensors))
        delivered += tensors + [None] * (width - len(tensors))
    return delivered


def compare(op: Operator, actual: Sequence[Any], expected: Sequence[Any], *, peer: bool) -> Agreement:
    """Agreement of two lists of :func:`written`. A peer may use other strides and may be merely close.

    A None in ``actual`` is a result that the peer does not deliver.
    """
    if len(actual) != len(expected):
        return Agreement(DIFFERENT, f"{len(actual)} results instead of {len(expected)}")
    differences = []
    close = True
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        if want is None or (peer and got is None):
            continue
        rule = op.equality[index] if index < len(op.equality) else op.equality[0]
        difference = _difference(rule, got, want, peer)
        if difference:
            differences.append(f"result {index}: {difference}" if len(expected) > 1 else difference)
            close = close and _difference(Roughly(), got, want, peer) is None
    if not differences:
        return Agreement(EQUAL)
    return Agreement(CLOSE if peer and close else DIFFERENT, "; ".join(differences))


def alike(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Agreement:
    """Agreement of two implementations that no operator's rule applies to: the same bytes, or up to rounding."""
    pairs = list(zip(actual, expected, strict=True))
    if all(BITWISE.difference(*pair) is None for pair in pairs):
        return Agreement(EQUAL)
    found = [(index, Roughly().difference(*pair)) for index, pair in enumerate(pairs)]
    texts = [f"result {index}: {text}" for index, text in found if text]
    return Agreement(DIFFERENT if texts else CLOSE, "; ".join(texts))


def parts(op: Operator, result: Any) -> list[Any]:
    """The parts of a public result in order; None where an optional one is absent."""
    try:
        return op.leaves(result)
    except (TypeError, ValueError):  # a ``finish`` may return more than the annotation says: lists of numbers
        return list(_flat(result))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple) or (isinstance(value, list) and any(isinstance(v, Tensor) for v in value)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _difference(rule: Equality, actual: Any, expected: Any, peer: bool) -> str | None:
    if not isinstance(expected, Tensor):
        return None if actual == expected else f"{actual!r} instead of {expected!r}"
    if not isinstance(actual, Tensor):
        return f"a {type(actual).__name__} instead of a tensor"
    if peer and actual.shape == expected.shape and actual.dtype == expected.dtype:
        same = torch.empty_strided(expected.shape, expected.stride(), dtype=expected.dtype, device=expected.device)
        actual = same.copy_(actual)
    return rule.difference(actual, expected)
