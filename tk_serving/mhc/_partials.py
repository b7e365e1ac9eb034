"""The split product of the residual streams with the mixing matrix, shared by every operator that starts with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.mhc._shapes import BF16, F32, MULT, hidden, lead, rows
from tk_serving.operator import Launch, Out

MAX_MIXES = 32
_UNIT = 32  # columns of the hidden dimension that one warp works on
_MAX_WARPS = 16
_SHARED_MEMORY = 226 * 1024


def check(expect: Expect, residual: Tensor, fn: Tensor, norm_weight: Tensor | None, n_splits: int) -> tuple[tuple[int, ...], int]:
    """Check the operands; (leading sizes, hidden size)."""
    size = hidden(expect, "residual", residual)
    tokens = lead(expect, "residual", residual, BF16, MULT, "H")
    expect.tensor("mhc_fn", fn, F32, ("m", MULT * size))
    expect.that(1 <= fn.shape[0] <= MAX_MIXES, "mhc_fn", f"1 to {MAX_MIXES} rows", fn.shape[0])
    if norm_weight is not None:
        expect.tensor("mhc_norm_weight", norm_weight, F32, (MULT * size,))
    expect.at_least("n_splits", n_splits, 1)
    expect.same_device(residual=residual, mhc_fn=fn, mhc_norm_weight=norm_weight)
    return tokens, size


def num_splits(size: int, mixes: int, n_splits: int) -> int:
    """Splits of the hidden dimension: at most ``n_splits``, unless a slice would not fit one multiprocessor."""
    units = size // _UNIT
    of_warp = -(-mixes // 8) * 4096 + 64 * (mixes + 1)
    warps = min(-(-units // n_splits), _MAX_WARPS, _SHARED_MEMORY // of_warp)
    return -(-units // warps)


def outputs(splits: int, tokens: int, mixes: int) -> tuple[Out, Out]:
    """Partial products and partial square sums."""
    return Out((splits, tokens, mixes), F32), Out((splits, tokens), F32)


def launch(size: int, mixes: int, splits: int, fold: bool, at: int) -> Launch:
    """Launch that writes the partial sums to the plan's tensors ``at`` and ``at + 1``.

    The operator's first three arguments are the residual, the matrix, and the norm weight or None.
    """

    def arguments(outs: Sequence[Tensor], residual: Tensor, fn: Tensor, norm_weight: Tensor | None, *_: Any) -> tuple:
        fn = rows(fn, MULT * size)
        weight = rows(norm_weight) if norm_weight is not None else fn[0]
        return rows(residual, MULT, size), fn, weight, outs[at], outs[at + 1]

    return Launch("mhc.norm_fn", {"hidden": size, "mixes": mixes, "splits": splits, "fold": fold}, arguments)
