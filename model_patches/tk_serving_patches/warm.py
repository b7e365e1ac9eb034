"""Kernels for every number of tokens, loaded before the first request.

An engine's own warm-up runs a few batch sizes; some operators have other kernels for other sizes. The calls that it
makes are noted by shape, planned again for many numbers of tokens, and what is missing is compiled or loaded: nothing
runs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tk_serving.config import settings
from tk_serving.operator import Operator

log = logging.getLogger(__name__)

_noted: dict[tuple[Any, ...], tuple[Operator, int, tuple[Any, ...]]] = {}
_made: dict[Hashable, Callable[[int], Iterable[tuple[Any, tuple, dict[str, Any]]]]] = {}
_open = False
_MANY = 16  # rows of a tensor for each token, at most


def start() -> None:
    """Note calls from now on."""
    global _open
    _noted.clear()
    _made.clear()
    _open = True


def note(function: Any, tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note one call of an operator, by the shapes of its arguments."""
    if not _open or not tokens or torch.compiler.is_compiling():
        return
    operator = function.operator
    bound = operator.bind(*args, **kwargs)
    key = (operator.name, *_key(bound, tokens))
    if key not in _noted:
        _noted[key] = (operator, tokens, tuple(_map(bound, _shape)))


def note_made(key: Hashable, make: Callable[[int], Iterable[tuple[Any, tuple, dict[str, Any]]]]) -> None:
    """Note calls whose shapes do not simply grow with the tokens: ``make`` gives (operator, arguments, keyword
    arguments) for a number of tokens, on meta tensors."""
    if _open:
        _made.setdefault(key, make)


def run(counts: Iterable[int], device: torch.device) -> int:
    """Compile or load the kernels of the noted calls for these numbers of tokens; return how many are ready."""
    global _open
    _open = False
    from tk_serving.compile import kernels

    arch = kernels.arch_of(torch.cuda.get_device_capability(device))
    launches = {launch.key: launch for count in counts for launch in _launches(count)}
    ready = 0
    with torch.cuda.device(device):
        for launch in launches.values():
            missing = kernels.unavailable(launch, arch) if settings.jit == "forbid" else ""
            if missing:
                log.warning("%s: calls that need it stay with the engine", missing)
                continue
            kernels.load(launch, arch)
            ready += 1
    return ready


def _launches(count: int) -> Iterator[Any]:
    for operator, tokens, args in _noted.values():
        resized = tuple(_map(args, functools.partial(_resize, tokens=tokens, count=count)))
        try:
            yield from operator.plan(*resized).launches
        except (TypeError, ValueError) as error:
            log.debug("%s: no plan for %d tokens: %s", operator.name, count, error)
    for make in _made.values():
        for function, args, kwargs in make(count):
            operator = function.operator
            yield from operator.plan(*operator.bind(*args, **kwargs)).launches


def _key(value: Any, tokens: int) -> Iterator[Any]:
    for item in value:
        if isinstance(item, Tensor):
            rows = item.shape[0] / tokens if item.dim() and item.shape[0] % tokens == 0 else item.shape[:1]
            yield rows, item.shape[1:], item.dtype, item.is_contiguous()
        elif isinstance(item, (tuple, list)):
            yield tuple(_key(item, tokens))
        else:
            yield item


def _map(value: Iterable[Any], change: Callable[[Tensor], Tensor]) -> Iterator[Any]:
    for item in value:
        if isinstance(item, Tensor):
            yield change(item)
        elif isinstance(item, (tuple, list)):
            yield type(item)(_map(item, change))
        else:
            yield item


def _shape(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _resize(tensor: Tensor, tokens: int, count: int) -> Tensor:
    """The tensor of another number of tokens, if its first dimension counts tokens or slots of tokens."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not rows or rows % tokens or rows // tokens > _MANY or not tensor.is_contiguous():
        return tensor
    return tensor.new_empty(rows // tokens * count, *tensor.shape[1:])


def counts(most: int) -> list[int]:
    """Numbers of tokens around which operators change their kernels, up to the largest batch."""
    steps = {1, 2, 3, 4, 6, 12, 24, 40, 48, 96, 192, 384, 768, 1536, 3072, 6144, most}
    steps |= {n + more for i in range(3, 16) for n in (1 << i,) for more in (0, 1)}
    return sorted(n for n in steps if n <= most)
