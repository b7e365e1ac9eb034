"""The split product of the residual streams with the mixing matrix, shared by every operator that starts with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.mhc._shapes import BF16, F32, MULT, hidden, lead, rows
from tk_serving.operator import Launch, Out

MAX_MIXES = 32
_UNIT = 32  # columns of the hidden dimension that one warp works on
_MAX_WARPS = 16
_SHARED_MEMORY = 226 * 1024


def check(
    expect: Expect,
    residual: Tensor,
    fn: Tensor,
    norm_weight: Tensor | None,
    n_splits: int,
    *,
    names: tuple[str, str] = ("fn", "norm_weight"),
    mixes: int | None = None,
) -> tuple[tuple[int, ...], int]:
    """Check the operands, ``fn`` with that many rows; (leading sizes, hidden size)."""
    size = hidden(expect, "residual", residual)
    tokens = lead(expect, "residual", residual, BF16, MULT, "H")
    check_fn(expect, size, fn, norm_weight, n_splits, names=names, mixes=mixes)
    expect.same_device(residual=residual, **{names[0]: fn, names[1]: norm_weight})
    return tokens, size


def check_fn(
    expect: Expect,
    size: int,
    fn: Tensor,
    norm_weight: Tensor | None,
    n_splits: int,
    *,
    names: tuple[str, str] = ("fn", "norm_weight"),
    mixes: int | None = None,
) -> None:
    expect.tensor(names[0], fn, F32, (mixes or "m", MULT * size))
    expect.that(1 <= fn.shape[0] <= MAX_MIXES, names[0], f"1 to {MAX_MIXES} rows", fn.shape[0])
    if norm_weight is not None:
        expect.tensor(names[1], norm_weight, F32, (MULT * size,))
    expect.at_least("n_splits", n_splits, 1)


def num_splits(size: int, mixes: int, n_splits: int) -> int:
    """Splits of the hidden dimension: at most ``n_splits``, unless a slice would not fit one multiprocessor."""
    units = size // _UNIT
    of_warp = -(-mixes // 8) * 4096 + 64 * (mixes + 1)
    warps = min(-(-units // n_splits), _MAX_WARPS, _SHARED_MEMORY // of_warp)
    return -(-units // warps)


def outputs(splits: int, tokens: int, mixes: int) -> tuple[Out, Out]:
    """Partial products and partial square sums."""
    return Out((splits, tokens, mixes), F32), Out((splits, tokens), F32)


def launch(
    size: int, mixes: int, splits: int, fold: bool, at: int, operands: Callable[..., tuple] = lambda *args: args[:3]
) -> Launch:
    """Launch that writes the partial sums to the plan's tensors ``at`` and ``at + 1``.

    ``operands(*args)`` gives the residual, the matrix, and the norm weight or None.
    """

    def arguments(outs: Sequence[Tensor], *args: Any) -> tuple:
        residual, fn, norm_weight = operands(*args)
        fn = rows(fn, MULT * size)
        weight = rows(norm_weight) if norm_weight is not None else fn[0]
        return rows(residual, MULT, size), fn, weight, outs[at], outs[at + 1]

    return Launch("mhc.norm_fn", {"hidden": size, "mixes": mixes, "splits": splits, "fold": fold}, arguments)
