"""Gradients of RMSNorm."""

import torch
from torch import Tensor

from tk_serving import config
from tk_serving.compare import BITWISE
from tk_serving.expect import Expect, short
from tk_serving.operator import Existing, Launch, Out, Plan, operator
from tk_serving.quant import norms, sums
from tk_serving.workloads import MODELS, Maker, Workload

BLOCKS = 2  # on a multiprocessor
GROUPS = 16  # of partial sums

_expect = Expect("norm_backward")


def _plan(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None,
    out_scale: float,
    weight_grad: Tensor | None,
) -> Plan:
    _expect.that(x.dim() == 2, "x", "shape [T, H]", list(x.shape))
    norms.check(_expect, x, weight, None, None)
    tokens, hidden = x.shape
    _expect.tensor("out_grad", out_grad, x.dtype, (tokens, hidden), contiguous=False)
    _expect.tensor("rstd", rstd, torch.float32, (tokens,))
    if residual_out_grad is not None:
        _expect.tensor("residual_out_grad", residual_out_grad, x.dtype, (tokens, hidden), contiguous=False)
    if weight_grad is not None:
        _expect.that(weight is not None, "weight_grad", "None without a weight", "a tensor")
        _expect.tensor("weight_grad", weight_grad, norms.DTYPES, (hidden,))
    _expect.same_device(x=x, out_grad=out_grad, rstd=rstd, residual_out_grad=residual_out_grad, weight_grad=weight_grad)
    partials = BLOCKS * config.get_num_sms()
    main = Launch(
        "quant.norm_backward",
        norms.config(x, out_grad, weight, residual_out_grad)
        | {"weight": weight is not None, "residual": residual_out_grad is not None},
        lambda buffers, grad, x, weight, rstd, residual, scale, _: (
            *(grad, x, weight, rstd, residual, buffers[0], buffers[2] if weight is not None else None),
            *(float(scale), partials),
        ),
    )
    launches: tuple[Launch, ...] = (main,)
    slot: Out | Existing | None = None
    scratch = Out((partials, hidden), torch.float32)
    if weight is not None:
        slot = Out((hidden,), weight.dtype)
        if weight_grad is not None:
            slot = Existing("weight_grad") if tokens else None  # without rows it stays as it is
        summed = weight if weight_grad is None else weight_grad
        launches += (
            Launch(
                "quant.norm_backward:weights",
                {"dtype": short(summed.dtype), "add": weight_grad is not None},
                lambda buffers, *args: (buffers[2], buffers[1], float(args[5])),
            ),
        )
    return Plan((Out((tokens, hidden), x.dtype), slot), launches if tokens else (), (scratch,))


def _finish(results, *args):
    weight, weight_grad = args[2], args[6]
    return results[0], None if weight is None else results[1] if weight_grad is None else weight_grad


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    dtype: str = "bfloat16",
    pad: int = 0,
    weighted: bool = True,
    residual: bool = False,
    out_scale: float = 1.0,
    into: str = "",
) -> tuple:
    kind = getattr(torch, dtype)
    grad, x, added = (make.randn(tokens, hidden + pad, dtype=kind)[:, :hidden] for _ in range(3))
    weight = make.randn(hidden, dtype=kind) if weighted else None
    given = make.randn(hidden, dtype=getattr(torch, into)) if into else None
    return grad, x, weight, make.rand(tokens) + 0.5, added if residual else None, out_scale, given


@operator(
    spec="operators.md A5",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("weight_grad",),
    finish=_finish,
    cases=[
        {"tokens": 0, "hidden": 64, "into": "float32"},
        {"tokens": 5, "hidden": 1296, "residual": True, "pad": 8, "out_scale": 0.7},
        {"tokens": 300, "hidden": 528, "dtype": "float32", "into": "float32"},
        {"tokens": 3, "hidden": 528, "into": "bfloat16", "residual": True},
        {"tokens": 3, "hidden": 528, "weighted": False, "out_scale": 1.5},
    ],
    workloads=[
        Workload(f"{m.name}-fine-tuning", {"hidden": m.hidden_size, "residual": True}, (4096, 8192), m.key)
        for m in MODELS
    ],
    peers=["tile_kernels"],
)
def norm_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``norm_forward`` by its input (which is that by the residual as well) and by its weight.

    In float32, with W = weight * out_scale and g = out_grad: rstd (W g - x rstd^2 sum(W g x) / H), plus
    ``residual_out_grad``, rounded once; sum over the rows of out_scale g x rstd.

    Args:
        out_grad: bfloat16 or float32 [T, H], row-strided, H a multiple of 16 up to 16384.
        x: what the forward pass normalised, like ``out_grad``.
        weight: [H] in the dtype of x; 1 if None.
        rstd: float32 [T] of the forward pass.
        residual_out_grad: gradient of the residual stream, like ``out_grad``.
        out_scale: as in the forward pass.
        weight_grad: bfloat16 or float32 [H], to which the weight gradient is added.

    Returns:
        (x_grad like x, weight gradient [H] in the dtype of the weight, or ``weight_grad``; None without a weight).

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or layout.
    """
    g, values, inverse = out_grad.float(), x.float(), rstd[:, None]
    hidden = torch.full_like(rstd, x.shape[1])
    scaled = norms.scaled(weight, out_scale, x)
    mean = sums.row_sum(scaled * g * values) / hidden
    gx = inverse * (scaled * g - values * (rstd * rstd * mean)[:, None])
    if residual_out_grad is not None:
        gx = gx + residual_out_grad.float()
    if weight is None:
        return gx.to(x.dtype), None
    # Row t adds to the partial sum t modulo P; partial sum p to group p modulo 16.
    partials = _ascending(g * values * inverse, BLOCKS * config.get_num_sms())
    total = _ascending(_ascending(partials, GROUPS), 1)[0] * torch.tensor(
        out_scale, dtype=torch.float32, device=x.device
    )
    if weight_grad is not None:
        return gx.to(x.dtype), (weight_grad.float() + total).to(weight_grad.dtype)
    return gx.to(x.dtype), total.to(weight.dtype)


def _ascending(rows: Tensor, count: int) -> Tensor:
    """[count, H]: row r of the result is the sum of rows r, r + count, ..., in this order."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % count)).view(-1, count, rows.shape[1])
    total = padded.new_zeros(count, rows.shape[1])
    for part in padded:
        total = total + part
    return total
