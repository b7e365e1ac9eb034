"""Backward pass of the gates, shared by the mixes of a sublayer and of the output head."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.mhc._shapes import F32, MIXES, MULT, count, lead, result
from tk_serving.operator import Launch, Out, Plan

_TOKENS_PER_PART = 64
_MAX_PARTS = 64


def plan_backward(
    expect: Expect,
    columns: int,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    owned: tuple[Tensor | None, ...],
    post_mult: float,
    name: str,
) -> Plan:
    """Plan for (mixes, scale, base) gradients.

    The operator's first arguments are the gradients of pre, post and comb, or with 4 columns that of the head's mix.
    """
    tokens = lead(expect, name, mixes, F32, columns)
    expect.tensor("mhc_scale", scale, F32, (3 if columns == MIXES else 1,))
    expect.tensor("mhc_base", base, F32, (columns,))
    slots = tuple(
        result(expect, f"{argument}_grad", out, like.shape, F32)
        for argument, out, like in zip((name, "mhc_scale", "mhc_base"), owned, (mixes, scale, base), strict=True)
    )
    # The number of partial sums follows from the tokens alone, so that gradients do not depend on the device.
    parts = min(-(-count(tokens) // _TOKENS_PER_PART), _MAX_PARTS)
    scratch = (Out((parts, columns), F32), Out((parts, columns), F32))

    def arguments(outs: Sequence[Tensor], *args: Any) -> tuple:
        widths = (MULT, MULT, MULT * MULT) if columns == MIXES else (MULT,) * 3
        given = args[:3] if columns == MIXES else args[:1] * 3
        views = (grad.view(-1, width) for grad, width in zip(given, widths, strict=True))
        return *views, mixes.view(-1, columns), scale, base, outs[0].view(-1, columns), outs[3], outs[4], post_mult

    def sums(outs: Sequence[Tensor], *_: Any) -> tuple:
        return outs[3], outs[4], outs[2], outs[1]

    launches = (
        Launch("mhc.split_mixes:backward", {"columns": columns}, arguments),
        Launch("mhc.split_mixes:backward_sums", {"columns": columns}, sums),
    )
    return Plan(slots, launches if count(tokens) else (), scratch)
