"""What the SwiGLU operators share: the checks of their arguments, their launches, their values in torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_serving import config
from tk_serving.expect import Expect, short
from tk_serving.layout import aligned
from tk_serving.plan import Launch
from tk_serving.quant import scales

FEW_ROWS = 64
"""Up to so many rows a warp of the kernel takes half as many columns."""
LISTED_ROWS, LISTED_COLUMNS = range(1 << 15, 38401), 2048
"""So many expert-major rows, of so many columns or more: a block looks through 128 rows, not 32. V3 and V4-Flash have
them from 64 to 512 tokens, in regions that are multiples of 128, of which few rows are live; 1 and 4096 tokens lose."""
LARGEST_LEAN_LIMIT = 2.0**31
"""No product of values under this limit and a routing weight up to 2^64 overflows."""
HELD = 8
"""Octets of a row that a lane may hold in registers where a row has one scale: H <= 65536."""


@dataclass(frozen=True)
class Rows:
    """How the rows of [N, 2 H] are weighted, which of them are padding, and what is counted.

    Attributes:
        positions, topk_weights: int32 [N] and float32 [T, K]: a row has the flat weight at its position; below 0 or
            past the end it is a row of zeros.
        row_weights, factor: float32 [N] or None, and the number that multiplies them.
        experts: int32 [N] or None; rows below 0 are padding.
        psum: int32 [E] or None; expert e owns the rows from psum[e - 1], aligned, to psum[e]; other rows are padding.
        clamp: upper limit of the gate, limit of the magnitude of the up half; or None.
        counts: int64 [3] or [4] totals of clamped elements (and of elements of rows that are not padding), or None.
    """

    positions: Tensor | None = None
    topk_weights: Tensor | None = None
    row_weights: Tensor | None = None
    factor: float | None = None
    experts: Tensor | None = None
    psum: Tensor | None = None
    clamp: float | None = None
    counts: Tensor | None = None

    def check(self, expect: Expect, x: Tensor, factor: int, names: dict[str, str]) -> tuple[int, int]:
        """Check x (H a multiple of ``factor``) and the arguments; (N, H). ``names`` are public names that differ."""

        def named(attribute: str) -> str:
            return names.get(attribute, attribute)

        rows, width = expect.tensor("x", x, (torch.bfloat16, torch.float32), ("N", "2 H"))
        ok = width > 0 and width % (2 * factor) == 0
        expect.that(ok, "x", f"2 H columns, H a positive multiple of {factor}", width)
        if self.positions is not None:
            expect.tensor(named("positions"), self.positions, torch.int32, (rows,))
        if self.topk_weights is not None:
            expect.tensor(named("topk_weights"), self.topk_weights, torch.float32, ("T", "K"))
        if self.row_weights is not None:
            expect.tensor(named("row_weights"), self.row_weights, torch.float32, (rows,))
        if self.experts is not None:
            expect.tensor(named("experts"), self.experts, torch.int32, (rows,))
        if self.psum is not None:
            expect.tensor(named("psum"), self.psum, torch.int32, ("E",))
        if self.clamp is not None:
            expect.positive(named("clamp"), self.clamp)
        expect.same_device(
            x=x,
            **{
                named(name): getattr(self, name)
                for name in ("positions", "topk_weights", "row_weights", "experts", "psum", "counts")
            },
        )
        return rows, width // 2

    def check_counts(self, expect: Expect, size: int, clamp: str) -> None:
        if self.counts is not None:
            expect.tensor("clamped_count", self.counts, torch.int64, (size,))
            expect.that(self.clamp is not None, "clamped_count", f"{clamp} as well", None)

    @property
    def some_weights(self) -> bool:
        return self.topk_weights is None or self.topk_weights.numel() > 0

    @property
    def config(self) -> dict[str, Any]:
        """Compile-time arguments of the kernels."""
        weights = {"topk": self.topk_weights, "row": self.row_weights, "factor": self.factor}
        padding = {"expert": self.experts, "psum": self.psum}
        return {
            "weights": next((name for name, value in weights.items() if value is not None), None),
            "padding": next((name for name, value in padding.items() if value is not None), None),
            "clamp": self.clamp is not None,
            "counters": 0 if self.counts is None else self.counts.shape[0],
        }


def launch(
    x: Tensor,
    rows: Rows,
    rows_of: Callable[..., Rows],
    fmt: str,
    npc: int,
    layout: str,
    round_sf: bool,
    floor: float,
    zero_padding: bool = True,
    rounded: bool = False,
    lean: bool = False,
) -> Launch:
    """The kernel for outputs (data, sf), or (data,) with ``npc`` 0; ``fmt`` is a quantised format or a dtype's name.

    ``rows_of`` finds ``rows`` in the public arguments of a call. ``lean`` asks for the form with fewer instructions
    where there is one; ``swiglu_forward_and_per_token_cast`` takes longer with it.
    """
    n, hidden = x.shape[0], x.shape[1] // 2
    zero_padding = zero_padding or rows.experts is None
    config_ = dict(
        rows.config,
        x=short(x.dtype),
        fmt=fmt,
        round_sf=round_sf,
        aligned=aligned(x),
        rounded=rounded,
    )
    if npc == hidden and npc not in (32, 64, 128):
        octets = hidden // 8
        warps = min(32, -(-octets // 128))
        config_ |= {"warps": warps, "held": -(-octets // (32 * warps)), "zero_padding": zero_padding}
        kernel = "quant.swiglu:by_row"
    else:
        # One half holds whole words of scales and, if routing weights are loaded ahead, finds some.
        halvable = npc and not (layout == scales.PACKED and npc == 128) and rows.some_weights
        halves = 1 if zero_padding and n <= FEW_ROWS and halvable else 2
        listed = n in LISTED_ROWS and hidden >= LISTED_COLUMNS
        shared_rows = 0 if zero_padding else 128 if listed else 32
        config_ |= {"npc": npc, "layout": layout, "halves": halves, "shared_rows": shared_rows}
        if lean and _can_be_lean(x, rows) and not rounded and (round_sf or not npc):
            config_["lean"] = True
        kernel = "quant.swiglu:by_group"
    numbers = (rows.clamp or 0.0, floor, 1.0 if rows.factor is None else rows.factor, config.get_token_alignment())

    def arguments(outputs: Sequence[Tensor | None], x: Tensor, *rest: Any) -> Sequence[Any]:
        data, sf = outputs if npc else (outputs[0], None)
        given = rows_of(x, *rest)
        return (
            x,
            given.positions,
            given.row_weights if given.topk_weights is None else given.topk_weights,
            given.experts,
            given.psum,
            given.counts,
            data,
            sf,
            *map(float, numbers[:3]),
            numbers[3],
        )

    return Launch(kernel, config_, arguments)


def _can_be_lean(x: Tensor, rows: Rows) -> bool:
    if x.dtype != torch.bfloat16 or rows.clamp is None or rows.counts is not None or rows.clamp > LARGEST_LEAN_LIMIT:
        return False
    return struct.pack(">f", rows.clamp).endswith(b"\0\0")  # a bfloat16


def check_rounding(expect: Expect, x: Tensor, round_activation: bool) -> None:
    expect.that(not round_activation or x.dtype == torch.bfloat16, "round_activation", "False with float32 x", True)


# -- the reference --------------------------------------------------------------------------------------------


def activate(x: Tensor, rows: Rows, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """(y float32 [N, H], bool [N]: rows that are not padding); adds to ``rows.counts``. Padding rows of y are 0.

    With ``rounded`` silu and its product with up are rounded to bfloat16.
    """
    n, width = x.shape
    gate, up = x[:, : width // 2].float(), x[:, width // 2 :].float()
    live = torch.ones(n, dtype=torch.bool, device=x.device)
    if rows.experts is not None:
        live = rows.experts >= 0
    if rows.psum is not None:
        live = owned(rows.psum, n)
    if rows.clamp is not None:
        limit = torch.tensor(rows.clamp, dtype=torch.float32, device=x.device)
        above, over, under = gate > limit, up > limit, up < -limit
        if rows.counts is not None:
            found = [(mask & live[:, None]).sum() for mask in (above, over, under)]
            if rows.counts.shape[0] == 4:
                found.append(live.sum() * gate.shape[1])
            rows.counts.add_(torch.stack(found))
        gate = torch.where(above, limit, gate)
        up = torch.where(over, limit, torch.where(under, -limit, up))
    y = gate / (1.0 + torch.exp(-gate))
    y = (y.bfloat16().float() * up).bfloat16().float() if rounded else y * up
    if rows.topk_weights is not None and rows.positions is not None:
        flat = rows.topk_weights.flatten()
        known = (rows.positions >= 0) & (rows.positions < flat.shape[0])
        place = torch.where(known, rows.positions, 0).long()
        y = y * flat[place][:, None] if flat.numel() else y
        y = torch.where(known[:, None], y, 0.0)
    elif rows.factor is not None or rows.row_weights is not None:
        weight = torch.ones(n, device=x.device) if rows.row_weights is None else rows.row_weights
        if rows.factor is not None:
            weight = weight * torch.tensor(rows.factor, dtype=torch.float32, device=x.device)
        y = y * weight[:, None]
    return torch.where(live[:, None], y, 0.0), live


def owned(psum: Tensor, rows: int) -> Tensor:
    """bool [rows]: rows inside an expert's interval."""
    alignment = config.get_token_alignment()
    before = torch.cat((psum.new_zeros(1), psum[:-1])) if psum.numel() else psum
    start = (before + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    row = torch.arange(rows, device=psum.device)[:, None]
    return ((row >= start) & (row < psum)).any(dim=1)
