"""Checks, launch and inputs of the reductions back to token order."""

from __future__ import annotations

import torch
from torch import Tensor

from tk_serving.expect import Expect, short
from tk_serving.layout import aligned
from tk_serving.moe import _fused
from tk_serving.operator import Existing, Launch, Out, Plan
from tk_serving.workloads import Maker

DATA = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
UNIT = 8  # columns of a thread


def plan(
    expect: Expect,
    arguments: object,
    *,
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    dtype: torch.dtype | None,
    sf: Tensor | None,
    shared: Tensor | None,
    out: Tensor | None,
) -> Plan:
    """``dtype`` of the result, if it is not that of the data; ``arguments`` is the function for the launch."""
    data, x_sf = split(x)
    name = "x" if x_sf is None else "x[0]"
    expect.dtype(name, data, *(DATA if x_sf is not None else DATA[:2]))
    rows, hidden = expect.tensor(name, data, data.dtype, ("N", "H"), contiguous=False)
    expect.multiple(name, hidden, UNIT, "a row length")
    if x_sf is not None:
        expect.tensor("x[1]", x_sf, torch.float32, (rows,))
    tokens, topk = expect.tensor("token_topk_to_pos", token_topk_to_pos, torch.int32, ("T", "K"))
    expect.that(topk > 0, "token_topk_to_pos", "at least one column", [tokens, topk])
    if topk_weights is not None:
        expect.tensor("topk_weights", topk_weights, torch.float32, (tokens, topk))
    if sf is not None:
        expect.tensor("sf", sf, torch.float32, (1,))
    if shared is not None:
        expect.tensor("shared", shared, DATA[:2], (tokens, hidden), contiguous=False)
    dtype = dtype or data.dtype
    result: Out | Existing = Out((tokens, hidden), dtype)
    if out is not None:
        expect.same("out", out, (tokens, hidden), dtype)
        result = Existing("out")
    expect.same_device(
        **{name: data, "x[1]": x_sf},
        topk_weights=topk_weights,
        token_topk_to_pos=token_topk_to_pos,
        sf=sf,
        shared=shared,
        out=out,
    )
    config = {
        "hidden": hidden,
        "dtype": short(data.dtype),
        "out_dtype": short(dtype),
        "num_topk": topk,
        "weighted": topk_weights is not None,
        "row_scaled": x_sf is not None,
        "scaled": sf is not None,
        "shared": "" if shared is None else short(shared.dtype),
    }
    if tokens and not rows and shared is not None:
        return Plan((result,), refusal="there are no rows to add to the shared output")
    launch = Launch("moe.reduce_fused", config, arguments)  # type: ignore[arg-type]
    return Plan((result,), (launch,) if tokens and rows else ())


def split(x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The data and their scales, if any."""
    return (x, None) if isinstance(x, Tensor) else x


def arguments(
    out: Tensor,
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    sf: Tensor | None = None,
    shared: Tensor | None = None,
) -> tuple:
    """Run-time arguments of the kernel."""
    data, x_sf = split(x)
    return data, x_sf, topk_weights, token_topk_to_pos, sf, shared, out, int(aligned(data, shared, out))


def traffic(x: Tensor | tuple[Tensor, Tensor], token_topk_to_pos: Tensor, out_size: int, *others: Tensor | None) -> int:
    """Bytes with one row read for every pair; ``out_size``: bytes of an element of the result."""
    data, x_sf = split(x)
    pairs, hidden = token_topk_to_pos.numel(), data.shape[1]
    row = hidden * data.element_size() + (4 if x_sf is not None else 0)
    read = sum(t.numel() * t.element_size() for t in (token_topk_to_pos, *others) if t is not None)
    return read + min(pairs, len(data)) * row + len(token_topk_to_pos) * hidden * out_size


def inputs(
    make: Maker, *, tokens: int, hidden: int, topk: int, experts: int, alignment: int, dtype: str, x_sf: bool
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Tensor]:
    """Rows (NaN where padding, which nobody may read), weights and positions."""
    positions, pos_to_expert = _fused.mapping(make, tokens, experts, topk, alignment, drop=topk < 4)
    rows = len(pos_to_expert)
    data = make.randn(rows, hidden)
    if data.device.type != "meta":
        data[pos_to_expert < 0] = float("nan")
    data = make.value(data.to(getattr(torch, dtype)))
    return (data, make.rand(rows)) if x_sf else data, make.rand(tokens, topk), positions
