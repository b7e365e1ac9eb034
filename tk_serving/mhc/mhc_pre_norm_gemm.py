"""Product of the residual streams with the mixing matrix and their square sums, in parts."""

import torch
from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc import _partials
from tk_serving.mhc._math import tf32
from tk_serving.mhc._shapes import BF16, MIXES, MULT, count
from tk_serving.operator import Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_norm_gemm")
_NAMES = ("mhc_fn", "mhc_norm_weight")


def _plan(residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, n_splits: int) -> Plan:
    tokens, size = _partials.check(_expect, residual, mhc_fn, mhc_norm_weight, n_splits, names=_NAMES)
    mixes = mhc_fn.shape[0]
    splits = _partials.num_splits(size, mixes, n_splits)
    launch = _partials.launch(
        size,
        mixes,
        splits,
        lambda outs, residual, fn, weight, _: _partials.Tensors(residual, fn, outs[0], outs[1], weight),
        fold=mhc_norm_weight is not None,
    )
    return Plan(_partials.outputs(splits, count(tokens), mixes), (launch,) if count(tokens) else ())


def _inputs(
    make: Maker, *, tokens: int, hidden: int, mixes: int = MIXES, folded: bool = False, splits: int = 16
) -> tuple:
    fn = make.randn(mixes, MULT * hidden, scale=(MULT * hidden) ** -0.5)
    weight = make.rand(MULT * hidden) if folded else None
    return make.randn(tokens, MULT, hidden, dtype=BF16), fn, weight, splits


@operator(
    spec="operators.md P35, A11",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=(Close(1e-3, 1e-3), Close(1e-5, 1e-5)),
    cases=[
        {"tokens": 0, "hidden": 128},
        {"tokens": 35, "hidden": 192, "splits": 2},
        {"tokens": 3, "hidden": 192, "mixes": 4, "folded": True, "splits": 2},
        {"tokens": 270, "hidden": 512},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
)
def mhc_pre_norm_gemm(
    residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None = None, n_splits: int = 16
) -> tuple[Tensor, Tensor]:
    """Products x fn^T and square sums of x, each in parts that are yet to be added (in ascending order).

    x is the residual, flattened to [T, 4 H]; fn is multiplied with the norm weight in float32, if there is one, and
    rounded to TF32. Products are exact, sums float32.

    Args:
        residual: bfloat16 [..., 4, H], contiguous, H a multiple of 64.
        mhc_fn: float32 [m, 4 H], contiguous, m at most 32.
        mhc_norm_weight: float32 [4 H], or None.
        n_splits: upper bound of the number of parts s, as far as a part fits the registers. Changes last bits.

    Returns:
        float32 [s, T, m] and [s, T]. A row has the same bits in any batch.
    """
    size = residual.shape[-1]
    splits = _partials.num_splits(size, mhc_fn.shape[0], n_splits)
    columns = -(-(size // 32) // splits) * 32
    fn = tf32(mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight)
    x, fn = wide(residual).reshape(-1, MULT, size), fn.reshape(-1, MULT, size)
    parts = [slice(at, at + columns) for at in range(0, size, columns)]
    mul = torch.stack([torch.einsum("tih,mih->tm", x[..., part], fn[..., part]) for part in parts])
    return mul, torch.stack([x[..., part].square().sum(dim=(1, 2)) for part in parts])
