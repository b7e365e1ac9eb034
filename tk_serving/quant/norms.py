"""What the RMSNorm operators share: the checks of their arguments, their launches, their values in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving.arithmetic import sqrt
from tk_serving.expect import Expect, short
from tk_serving.layout import aligned
from tk_serving.plan import Existing, Launch, Out
from tk_serving.quant import scales, sums

DTYPES = (torch.bfloat16, torch.float32)
LARGEST_HIDDEN = sums.TILE * sums.WARPS


def check(
    expect: Expect, x: Tensor, weight: Tensor | None, residual: Tensor | None, residual_out: Tensor | None
) -> Out | Existing | None:
    """Check the operands of a norm; the slot of the residual stream (None without a residual)."""
    expect.dtype("x", x, *DTYPES)
    expect.that(x.dim() in (2, 3), "x", "shape [T, H] or [B, T, H]", list(x.shape))
    hidden = x.shape[-1]
    ok = hidden > 0 and hidden % 16 == 0 and hidden <= LARGEST_HIDDEN
    expect.that(ok, "x", f"H that is a positive multiple of 16, at most {LARGEST_HIDDEN}", hidden)
    expect.row_strided("x", x)
    if weight is not None:
        expect.tensor("weight", weight, x.dtype, (hidden,))
    if residual is None:
        expect.that(residual_out is None, "residual_out", "None without a residual", "a tensor")
    for name, tensor in (("residual", residual), ("residual_out", residual_out)):
        if tensor is not None:
            expect.tensor(name, tensor, x.dtype, tuple(x.shape), contiguous=False)
    expect.same_device(x=x, weight=weight, residual=residual, residual_out=residual_out)
    if residual is None:
        return None
    return Out(tuple(x.shape), x.dtype) if residual_out is None else Existing("residual_out")


def config(x: Tensor, *tensors: Tensor | None) -> dict[str, Any]:
    """Compile-time arguments of a kernel whose blocks take a row; ``tensors``: what it loads or stores besides."""
    return {"x": short(x.dtype), "warps": sums.warps(x.shape[-1]), "aligned": aligned(x, *tensors)}


def forward_config(x: Tensor, *tensors: Tensor | None) -> dict[str, Any]:
    """With ``whole``: the row fills the tiles of its warps."""
    return config(x, *tensors) | {"whole": x.shape[-1] % sums.TILE == 0}


def launches(
    kernel: str,
    config: dict[str, Any],
    x: Tensor,
    operands: Callable[..., Sequence[Any]],
    tensors: Sequence[Any],
    merge: bool,
) -> tuple[Launch, ...]:
    """One launch, or one for each batch where the batches are no rows of one matrix.

    ``operands(outputs, *public arguments)``: the arguments of the kernel for a [T, H] input; those of [B, T, H] are
    cut here. ``tensors``: the operands that the caller made. ``merge``: the results of all batches form one matrix.
    """
    if x.dim() == 2:
        return (Launch(kernel, config, operands),)
    rows = x.shape[1]
    strided = (t for t in tensors if t is not None and t.dim() == 3)
    if merge and all(t.shape[0] == 1 or rows == 1 or t.stride(0) == rows * t.stride(1) for t in strided):
        return (Launch(kernel, config, lambda *args: [_merged(a, x) for a in operands(*args)]),)

    def batch(b: int) -> Launch:
        return Launch(kernel, config, lambda *args: [_batch(a, b, x) for a in operands(*args)])

    return tuple(batch(b) for b in range(x.shape[0]))


def _leads(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == x.shape[:2]


def _merged(value: Any, x: Tensor) -> Any:
    if not _leads(value, x):
        return value
    rows = x.shape[0] * x.shape[1]
    if value.dim() == 2:
        return value.view(rows)
    inner = value.stride(0) if x.shape[1] == 1 else value.stride(1)
    return value.as_strided((rows, value.shape[2]), (inner, value.stride(2)))


def _batch(value: Any, b: int, x: Tensor) -> Any:
    return value[b] if _leads(value, x) else value


# -- the reference --------------------------------------------------------------------------------------------


def normalize(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(result in the dtype of x, rstd, what was normalised)."""
    if residual is not None:
        x = (x.float() + residual.float()).to(x.dtype)
    values = x.float()
    number = torch.full(x.shape[:-1], float(x.shape[-1]), device=x.device)
    mean = sums.row_sum(values * values) / number
    rstd = torch.ones_like(mean) / sqrt(mean + torch.full_like(mean, eps))
    return (values * rstd[..., None] * scaled(weight, out_scale, x)).to(x.dtype), rstd, x


def scaled(weight: Tensor | None, out_scale: float, x: Tensor) -> Tensor:
    """weight * out_scale in float32."""
    factor = torch.tensor(out_scale, dtype=torch.float32, device=x.device)
    return factor if weight is None else weight.float() * factor


def lay_out(sf: Tensor, layout: str) -> Tensor:
    """[..., M, Kb] scales in a layout, each batch with a padding of its own."""
    if sf.dim() == 2:
        return scales.lay_out(sf, layout)
    slot = sf_out(layout, sf.shape[:-1], sf.shape[-1])
    stored = slot.zeros(sf.device)
    for b in range(sf.shape[0]):
        stored[b].copy_(scales.lay_out(sf[b], layout))
    return stored


def sf_out(layout: str, rows: Sequence[int], blocks: int) -> Out:
    """The allocation for the scales of ``rows`` = (T,) or (B, T)."""
    single = scales.sf_out(layout, rows[-1], blocks)
    if len(rows) == 1:
        return single
    if single.strides is None:
        return Out((rows[0], *single.shape), single.dtype)
    size = single.shape[1] * single.strides[1]
    return Out((rows[0], *single.shape), single.dtype, (size, *single.strides), rows[0] * size)
