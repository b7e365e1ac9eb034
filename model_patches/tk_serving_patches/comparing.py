"""Every replaced call beside the engine's own function, for debugging: ``TK_SERVING_COMPARE=1``.

The engine's function runs first, on copies of the call's tensors, then the replacement on the tensors themselves;
results and tensors that were written are compared. The first site beyond its bound is named in the log. Only calls that
reach Python are compared: switch CUDA graphs and ``torch.compile`` off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_serving.operator import tensors_of

BOUND, BOUND_CODES = 1e-2, 4e-2
"""Norm of the difference over the norm of the engine's result that rounding in bfloat16 explains; and for FP8 codes."""

LARGE = 1 << 28
"""Bytes from which on a tensor is taken for a weight or a workspace: it is neither copied nor compared."""

log = logging.getLogger(__name__)


@dataclass
class Seen:
    """What one site showed so far: calls, those beyond the bound, and the largest and the mean relative difference."""

    calls: int = 0
    beyond: int = 0
    largest: float = 0.0
    total: float = 0.0


_seen: dict[str, Seen] = {}
_first: list[str] = []
_replaced: list[frozenset[str]] = []
_state = threading.local()


def rows() -> list[dict[str, Any]]:
    """For every site: ``site``, ``calls``, ``beyond``, ``largest`` and ``mean`` relative difference."""
    return [
        {"site": site, "calls": s.calls, "beyond": s.beyond, "largest": s.largest, "mean": s.total / s.calls}
        for site, s in _seen.items()
    ]


def first() -> str | None:
    """The site of the first call that was beyond its bound."""
    return _first[0] if _first else None


def reset() -> None:
    """Forget what was seen."""
    _seen.clear()
    _first.clear()


@contextmanager
def only(sites: Collection[str]) -> Iterator[None]:
    """Calls of these sites are replaced and all others are the engine's, without a comparison: what one site does to
    the model's output."""
    _replaced.append(frozenset(sites))
    try:
        yield
    finally:
        _replaced.pop()


def by_id(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Weights and ids of a routing with the experts of a token in the order of their ids, which is free."""
    weights, ids = result
    ids, order = ids.sort(dim=-1)
    return weights.gather(-1, order), ids


def skip() -> None:
    """Called by a replacement: the present call cannot be compared, its input is not what the engine would have."""
    _state.skip = True


def both(
    site: str,
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    in_order: Callable[[Any], Any] | None = None,
    bound: float | None = None,
) -> Callable[..., Any]:
    """A replacement that compares itself with the original.

    Args:
        site: the name that differences are reported under.
        original: the engine's function.
        replacement: ours.
        in_order: brings a result of either into an order in which the two can be compared.
        bound: in place of ``BOUND`` and ``BOUND_CODES``.
    """

    def compared(*args: Any, **kwargs: Any) -> Any:
        if _replaced:
            return (replacement if site in _replaced[-1] else original)(*args, **kwargs)
        if getattr(_state, "engine_alone", False):  # inside an engine's function that is being compared
            return original(*args, **kwargs)
        if torch.compiler.is_compiling() or _capturing(args, kwargs):
            return replacement(*args, **kwargs)
        copied: list[tuple[Tensor, Tensor, Tensor]] = []
        _state.engine_alone = True
        try:
            theirs = original(*_copy(args, copied), **_copy(kwargs, copied))
        finally:
            _state.engine_alone = False
        _state.skip = False
        ours = replacement(*args, **kwargs)
        if not _state.skip:
            results = [in_order(one) if in_order else one for one in (ours, theirs)]
            pairs = [*zip(tensors_of(results[0]), tensors_of(results[1]), strict=True)]
            pairs += [(t, copy) for t, copy, before in copied if not (_same(t, before) and _same(copy, before))]
            _note(site, pairs, bound)
        _state.skip = False
        return ours

    return compared


def _note(site: str, pairs: list[tuple[Tensor, Tensor]], bound: float | None) -> None:
    seen = _seen.setdefault(site, Seen())
    seen.calls += 1
    worst = 0.0
    for i, (ours, theirs) in enumerate(pairs):
        found = distance(ours, theirs)
        limit = bound or (BOUND_CODES if ours.dtype.itemsize == 1 else BOUND)
        worst = max(worst, found)
        if not found <= limit:
            if not _first:
                log.error(
                    "compare: %s is the first site to deviate: tensor %d of call %d, %s %s, by %.2g (bound %.2g)",
                    site, i, seen.calls, ours.dtype, list(ours.shape), found, limit,
                )  # fmt: skip
            _first.append(site)
            seen.beyond += 1
            break
    seen.largest = max(seen.largest, worst)
    seen.total += worst


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of ``theirs``; for integers the share that differs."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if not ours.numel():
        return 0.0
    if not ours.is_floating_point():
        return (ours != theirs).float().mean().item()
    a, b = ours.float(), theirs.float()
    both_nan = a.isnan() & b.isnan()
    value = torch.where(both_nan, 0.0, a - b).norm() / torch.where(both_nan, 0.0, b).norm().clamp(min=1e-30)
    return float("inf") if value.isnan() else value.item()


def _capturing(*values: Any) -> bool:
    return any(t.is_cuda for t in tensors_of(values)) and torch.cuda.is_current_stream_capturing()


def _copy(value: Any, copied: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    """The value with copies of its tensors; ``copied`` receives each tensor, its copy, and its content as it was."""
    if isinstance(value, Tensor):
        if value.numel() * value.itemsize >= LARGE or value.device.type == "meta":
            return value
        copied.append((value, _clone(value), _clone(value)))
        return copied[-1][1]
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_copy(item, copied) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item, copied) for key, item in value.items()}
    return value


def _clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides, and with the padding that lies between and behind the elements."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size)
    room = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    length = min(room, span + max(tensor.stride()))
    return tensor.as_strided((length,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _same(a: Tensor, b: Tensor) -> bool:
    a, b = (t.contiguous().view(torch.uint8) if t.dim() else t for t in (a, b))
    return torch.equal(a, b)
