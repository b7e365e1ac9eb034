"""The split product of the residual streams with the mixing matrix, shared by every operator that starts with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.mhc._shapes import BF16, F32, MULT, hidden, lead, rows
from tk_serving.operator import Launch, Out, early_below

MAX_MIXES = 32
LATE = (7168, 1024)
"""Hidden size and tokens from which both passes launch late; between 64 and 4096 tokens not measured."""
_UNIT = 32  # columns of the hidden dimension that one warp works on
_MAX_WARPS = 16
_REGISTERS = 226 * 1024  # bytes of a multiprocessor's registers for a slice of the matrix and its sums


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
    warps = min(-(-units // n_splits), _MAX_WARPS, _REGISTERS // of_warp)
    return -(-units // warps)


def outputs(splits: int, tokens: int, mixes: int) -> tuple[Out, Out]:
    """Partial products and partial square sums."""
    return Out((splits, tokens, mixes), F32), Out((splits, tokens), F32)


def launches_early(size: int, tokens: int) -> bool:
    """Whether the pass over the streams and the launch behind it use programmatic dependent launch.

    On an H200 the two took 155 us late and 167 early for 4096 tokens of 7168; with the norm and the cast 171 and 192,
    but 11.6 and 10.7 for 64 tokens. At hidden sizes 4096 and 5120 the early launch was as fast or faster at both.
    """
    return size < LATE[0] or early_below(tokens, LATE[1])


NONE, FIRST, MIXED = "none", "first", "mixed"
"""What the pass over the streams also writes as a sublayer's input; see ``kernels/norm_fn.py``."""


@dataclass(slots=True)
class Tensors:
    """Tensors of one pass; absent ones are None."""

    residual: Tensor
    fn: Tensor
    mul: Tensor
    sqr: Tensor
    norm_weight: Tensor | None = None
    x: Tensor | None = None
    post: Tensor | None = None
    comb: Tensor | None = None
    updated: Tensor | None = None
    pre: Tensor | None = None
    layer_input: Tensor | None = None


def launch(
    size: int,
    mixes: int,
    splits: int,
    tensors: Callable[..., Tensors],
    *,
    fold: bool = False,
    update: bool = False,
    next_input: str = NONE,
    pdl: bool = True,
) -> Launch:
    """The pass over the streams; ``tensors(outs, *args)`` names the tensors of the call.

    ``update``: first update the streams after a sublayer, from x, post and comb to ``updated``.
    """
    config = {
        "hidden": size,
        "mixes": mixes,
        "splits": splits,
        "fold": fold,
        "update": update,
        "next_input": next_input,
    }

    def arguments(outs: Sequence[Tensor], *args: Any) -> tuple:
        t = tensors(outs, *args)
        residual, fn = rows(t.residual, MULT, size), rows(t.fn, MULT * size)
        # Any tensor of the right type stands for one that is absent.
        row, flat = residual[:1, 0], fn.view(-1)
        quad = flat[:MULT].view(1, MULT)
        return (
            row if t.x is None else rows(t.x, size),
            residual,
            quad if t.post is None else rows(t.post, MULT),
            flat[: MULT * MULT].view(1, -1) if t.comb is None else rows(t.comb, MULT * MULT),
            quad if t.pre is None else rows(t.pre, MULT),
            fn,
            fn[0] if t.norm_weight is None else rows(t.norm_weight),
            residual[:1] if t.updated is None else t.updated.view(-1, MULT, size),
            row if t.layer_input is None else t.layer_input.view(-1, size),
            t.mul,
            t.sqr,
        )

    return Launch("mhc.norm_fn", config, arguments, pdl=pdl)
