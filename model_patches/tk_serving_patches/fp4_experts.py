"""Layers whose FP4 experts are multiplied by FP8 activations as they are: may the operators run them, decided once, and
their weights laid out anew.

The engine's own kernel cannot run on the new layout, so that no call can be left to it afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tk_serving.modeling.fp8_experts import Fp4Weights, w4a8
from tk_serving.modeling.fp8_experts.chain import Call, Shape
from tk_serving_patches import calls, warm

SMALLEST_MAXIMUM = 1e-10  # the engines' lower bound for the maximum of a group
MOST_TOKENS = 1 << 15
"""Tokens of a step up to which the operators are asked."""

_NAMES, _PARTS = ("w13", "w2"), ("_weight", "_weight_scale")


def weights_of(layer: Any) -> Fp4Weights:
    """The weights of an engine's layer, repacked for Marlin."""
    return Fp4Weights(*(getattr(layer, name + part).data for name in _NAMES for part in _PARTS))


def decide(layer: Any, topk: int, total: int, dtype: torch.dtype, limit: float | None) -> Shape | str:
    """The sizes of a layer that can be laid out anew, or why the engine keeps it: see :func:`refusal`."""
    weights = weights_of(layer)
    return refusal(weights, topk, total, dtype, limit) or Shape(*weights.shape)


def laid_out(layer: Any, name: str) -> tuple[Tensor, Tensor]:
    """Tiles and scales of rows of one weight of a layer, ``w13`` or ``w2``."""
    return w4a8.laid_out(*(getattr(layer, name + part).data for part in _PARTS))


def lay_out(layer: Any, put: Callable[[Any, str, Tensor], None], pooled: bool = False) -> None:
    """Lay a layer's weights out in place of Marlin's, one after the other: never more than one is there twice.

    Args:
        layer: the engine's layer.
        put: replaces a parameter of the layer, by its name.
        pooled: whether weights lie in a memory pool, of which torch frees nothing before its end.
    """
    for name in _NAMES:
        tiles, sf = laid_out(layer, name)
        for part, data in zip(_PARTS, (w4a8.words(tiles), sf), strict=True):
            put(layer, name + part, data)
    if sf.is_cuda and not pooled:
        # The tiles do not fit where Marlin's weights were: without this, all of them would stay reserved.
        torch.cuda.empty_cache()


def refusal(weights: Fp4Weights, topk: int, total: int, dtype: torch.dtype, limit: float | None) -> str | None:
    """Why the engine keeps a layer, or None; then the kernels of all numbers of tokens are noted for the warm-up.

    Args:
        weights: of the experts of this rank, as the engine repacked them for Marlin.
        topk: choices of a token.
        total: experts of all ranks.
        dtype: of the activations.
        limit: of SwiGLU's inputs.
    """
    reason = weights.refusal_of_shape()
    if reason is not None:
        return reason
    sizes = topk, Shape(*weights.shape), total, dtype, limit
    reason = operators_refusal(weights.w13.device, *sizes) or w4a8.refusal(weights)
    if reason is None:
        warm.note_made(sizes, functools.partial(_calls, sizes=sizes))
    return reason


@functools.lru_cache(maxsize=64)
def operators_refusal(
    device: torch.device, topk: int, shape: Shape, total: int, dtype: torch.dtype, limit: float | None
) -> str | None:
    """The first refusal of the operators at any number of tokens, from shapes alone."""
    for tokens in warm.counts(MOST_TOKENS):
        for function, args, kwargs in _calls(tokens, (topk, shape, total, dtype, limit)):
            reason = calls.refusal(function, device, *args, **kwargs)
            if reason is not None:
                return reason
    return None


def _calls(tokens: int, sizes: tuple) -> Iterator[Call]:
    topk, shape, total, dtype, limit = sizes
    return w4a8.calls(tokens, topk, shape, total, dtype, limit, SMALLEST_MAXIMUM)
