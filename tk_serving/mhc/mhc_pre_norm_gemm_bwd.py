"""Gradients of the product of the residual streams with the mixing matrix and of their square sums."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc import _partials
from tk_serving.mhc._math import tf32
from tk_serving.mhc._shapes import BF16, F32, MIXES, MULT, count, rows
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_norm_gemm_bwd")
_TOKENS_PER_PART = 256
_COLUMNS = 256  # of a block
_BLOCKS = 384  # what a device works on at a time


def _plan(
    residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, out_mul_grad: Tensor, sqrsum_grad: Tensor
) -> Plan:
    lead, size = _partials.check(
        _expect, residual, mhc_fn, mhc_norm_weight, n_splits=1, names=("mhc_fn", "mhc_norm_weight")
    )
    tokens, mixes, columns = count(lead), mhc_fn.shape[0], MULT * size
    _expect.tensor("out_mul_grad", out_mul_grad, F32, (tokens, mixes))
    _expect.tensor("sqrsum_grad", sqrsum_grad, F32, (tokens,))
    _expect.same_device(residual=residual, out_mul_grad=out_mul_grad, sqrsum_grad=sqrsum_grad)
    # The number of partial sums follows from the shape alone, so that gradients do not depend on the device.
    parts = min(-(-tokens // _TOKENS_PER_PART), max(1, _BLOCKS * _COLUMNS // columns))

    def arguments(
        outs: Sequence[Tensor], residual: Tensor, fn: Tensor, norm_weight: Tensor | None, *grads: Tensor
    ) -> tuple:
        fn = rows(fn, columns)
        weight = fn[0] if norm_weight is None else rows(norm_weight)
        return rows(residual, columns), fn, weight, *grads, outs[0].view(-1, columns), outs[2]

    def sums(outs: Sequence[Tensor], *_: Any) -> tuple:
        return outs[2], outs[1]

    config = {"columns": columns, "mixes": mixes}
    launches = (
        Launch("mhc.norm_fn_backward", {**config, "fold": mhc_norm_weight is not None}, arguments),
        Launch("mhc.norm_fn_backward:sums", config, sums),
    )
    outputs = (Out(tuple(residual.shape), BF16), Out((mixes, columns), F32))
    return Plan(outputs, launches if tokens else (), (Out((parts, mixes, columns), F32),))


def _inputs(make: Maker, *, tokens: int, hidden: int, mixes: int = MIXES, folded: bool = False) -> tuple:
    fn = make.randn(mixes, MULT * hidden, scale=(MULT * hidden) ** -0.5)
    weight = make.rand(MULT * hidden) if folded else None
    residual = make.randn(tokens, MULT, hidden, dtype=BF16)
    return residual, fn, weight, make.randn(tokens, mixes), make.randn(tokens, scale=1e-3)


@operator(
    spec="operators.md P35",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(Close(1e-2, 1e-3), Close(1e-3, 3e-2)),
    cases=[
        {"tokens": 0, "hidden": 128},
        {"tokens": 300, "hidden": 64},
        {"tokens": 5, "hidden": 128, "mixes": 4, "folded": True},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
)
def mhc_pre_norm_gemm_bwd(
    residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, out_mul_grad: Tensor, sqrsum_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`mhc_pre_norm_gemm` for those of the summed products and square sums.

    Args:
        residual, mhc_fn, mhc_norm_weight: the arguments of the forward pass.
        out_mul_grad: float32 [T, m]; rounded to TF32.
        sqrsum_grad: float32 [T].

    Returns:
        bfloat16 [..., 4, H], the residual's gradient ``out_mul_grad fn + 2 x sqrsum_grad``, and float32 [m, 4 H], the
        gradient ``out_mul_grad^T x`` of the matrix as it is multiplied, norm weight included
        (see :func:`mhc_fn_normw_merge_bwd`).
    """
    fn = tf32(mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight)
    x, mul_grad = wide(residual).reshape(-1, fn.shape[1]), tf32(out_mul_grad)
    residual_grad = mul_grad @ fn + 2.0 * x * sqrsum_grad.unsqueeze(-1)
    return residual_grad.to(residual.dtype).view(residual.shape), mul_grad.T @ x
