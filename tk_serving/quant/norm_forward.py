"""RMSNorm, with the residual stream added before it."""

from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Existing, Out, Plan, operator
from tk_serving.quant import casting, norms, scales
from tk_serving.workloads import Maker, serving

_expect = Expect("norm_forward")


def _plan(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out_scale: float,
    out: Tensor | None,
    residual_out: Tensor | None,
    with_rstd: bool,
) -> Plan:
    stream = norms.check(_expect, x, weight, residual, residual_out)
    result = Out(tuple(x.shape), x.dtype)
    if out is not None:
        casting.check_given(_expect, "out", out, result)
    _expect.same_device(x=x, out=out)
    given = (weight, residual, residual_out, out)
    config = norms.forward_config(x, *given) | {
        "weight": weight is not None,
        "residual": residual is not None,
        "with_rstd": with_rstd,
        "out": str(x.dtype).removeprefix("torch."),
        "fmt": "e4m3",
        "npc": 0,
        "layout": scales.ROW,
        "round_sf": False,
        "mega": False,
    }

    def operands(outputs, x, weight, eps, residual, out_scale, *_):
        result, rstd, stream = outputs
        return x, weight, residual, stream, result, rstd, None, None, None, float(eps), float(out_scale), 1, 1

    launches = norms.launches("quant.norm", config, x, operands, (x, *given), True)
    slots = (
        result if out is None else Existing("out"),
        Out(tuple(x.shape[:-1]), torch.float32) if with_rstd else None,
        stream,
    )
    return Plan(slots, launches if x.numel() else ())


def _finish(results, x, weight, eps, residual, out_scale, out, residual_out, with_rstd):
    result, rstd, stream = results
    if residual is None:
        stream = x
    elif residual_out is not None:
        stream = residual_out
    return result if out is None else out, rstd if with_rstd else None, stream


def inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    dtype: str = "bfloat16",
    batch: int = 0,
    pad: int = 0,
    weighted: bool = True,
    residual: str = "",
) -> tuple:
    """(x, weight, eps, residual, residual_out): ``residual`` is empty, ``new`` or ``alias`` (its sum overwrites it)."""
    shape = (batch, tokens) if batch else (tokens,)
    kind = getattr(torch, dtype)
    x = make.randn(*shape, hidden + pad, dtype=kind)[..., :hidden]
    weight = make.randn(hidden, dtype=kind) if weighted else None
    added = make.randn(*shape, hidden + pad, dtype=kind, scale=3.0)[..., :hidden] if residual else None
    return x, weight, 1e-6, added, added if residual == "alias" else None


def _inputs(
    make: Maker, *, out_scale: float = 1.0, out: bool = False, with_rstd: bool = False, **operands: Any
) -> tuple:
    x, weight, eps, residual, residual_out = inputs(make, **operands)
    given = make.randn(*x.shape, dtype=x.dtype) if out else None
    return x, weight, eps, residual, out_scale, given, residual_out, with_rstd


@operator(
    spec="operators.md A3",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("out", "residual_out"),
    finish=_finish,
    cases=[
        {"tokens": 0, "hidden": 64, "residual": "new", "with_rstd": True},
        {"tokens": 3, "hidden": 1296, "residual": "alias", "pad": 8, "with_rstd": True, "out_scale": 0.7},
        {"tokens": 3, "hidden": 528, "dtype": "float32", "weighted": False, "out_scale": 1.5, "batch": 2, "pad": 16},
        {"tokens": 2, "hidden": 208, "residual": "new", "out": True},
        {"tokens": 3, "hidden": 208, "batch": 2, "residual": "alias", "with_rstd": True},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size, "residual": "alias"}),
    peers=["vllm", "tile_kernels"],
)
def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """RMSNorm of the rows of x, or of x + residual: r * rstd * (weight * out_scale), rstd = 1 / sqrt(mean(r^2) + eps).

    In float32. The sum with the residual is rounded to the dtype of x before the norm. Sums over a row have a fixed
    order that depends on H alone.

    Args:
        x: bfloat16 or float32 [T, H] or [B, T, H], row-strided, H a multiple of 16 up to 16384.
        weight: [H] in the dtype of x; 1 if None.
        eps: added to the mean square.
        residual: like x.
        out_scale: multiplies the weight.
        out: preallocated result, contiguous.
        residual_out: receives x + residual, row-strided; may be ``residual`` itself. A new tensor by default.
        with_rstd: return rstd as well.

    Returns:
        (out like x, rstd float32 [T] or [B, T] or None, what was normalised: x + residual, or x itself).

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or layout.
    """
    result, rstd, stream = norms.normalize(x, weight, eps, residual, out_scale)
    return result, rstd if with_rstd else None, stream
