"""Gradient of the RMS scaling of a pre-norm product."""

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._math import inverse_rms, tf32
from tk_serving.mhc._partials import MAX_MIXES
from tk_serving.mhc._shapes import F32, MIXES, MULT
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_reduce_partials_and_rmsnorm_bwd")


def _plan(
    out_grad: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out_mul_grad: Tensor,
    sqrsum_grad: Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> Plan:
    tokens, groups, mixes = _expect.tensor("out_mul", out_mul, F32, ("T", "g", "m"))
    _expect.that(1 <= mixes <= MAX_MIXES, "out_mul", f"1 to {MAX_MIXES} mixes", mixes)
    _expect.tensor("out_grad", out_grad, F32, (tokens, mixes))
    _expect.tensor("sqrsum", sqrsum, F32, (tokens, groups))
    _expect.tensor("out_mul_grad", out_mul_grad, F32, (tokens, groups, mixes))
    _expect.tensor("sqrsum_grad", sqrsum_grad, F32, (tokens, groups))
    _expect.at_least("rms_group_size", rms_group_size, 1)
    _expect.same_device(
        out_grad=out_grad, out_mul=out_mul, sqrsum=sqrsum, out_mul_grad=out_mul_grad, sqrsum_grad=sqrsum_grad
    )
    launch = Launch(
        "mhc.reduce_partials:backward",
        {"norm_groups": groups, "mixes": mixes},
        lambda _, grad, mul, sqr, mul_grad, sqr_grad, size, eps: (grad, mul, sqr, mul_grad, sqr_grad, float(size), eps),
    )
    return Plan((), (launch,) if tokens and groups else ())


def _inputs(make: Maker, *, tokens: int, groups: int = 1, size: int = MULT * 4096) -> tuple:
    mul, sqr = make.randn(tokens, groups, MIXES), make.rand(tokens, groups) * (2.0 * size)
    return (
        make.randn(tokens, MIXES),
        mul,
        sqr,
        make.randn(tokens, groups, MIXES),
        make.randn(tokens, groups),
        size,
        1e-6,
    )


@operator(
    spec="operators.md A11, P35",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(Close(1e-3, 1e-6), Close(1e-4, 1e-8)),
    mutates=("out_mul_grad", "sqrsum_grad"),
    cases=[{"tokens": 0}, {"tokens": 9}, {"tokens": 3, "groups": 2}],
    workloads=serving(lambda m: {"size": MULT * m.hidden_size} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_reduce_partials_and_rmsnorm_bwd(
    out_grad: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out_mul_grad: Tensor,
    sqrsum_grad: Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> None:
    """Gradients of :func:`mhc_reduce_partials_and_rmsnorm_fwd` for its two sums.

    With r = 1/sqrt(sqrsum / G + eps): out_mul_grad = out_grad r, rounded to TF32, and
    sqrsum_grad = -r / (2 (sqrsum + eps G)) times the sum of out_grad out_mul.

    Args:
        out_grad: float32 [T, m].
        out_mul, sqrsum: float32 [T, g, m] and [T, g], from the forward pass.
        out_mul_grad, sqrsum_grad: written; shapes of out_mul and sqrsum.
        rms_group_size, rms_eps: as in the forward pass.
    """
    scale = inverse_rms(sqrsum, rms_group_size, rms_eps)
    grad = out_grad.unsqueeze(1)
    out_mul_grad.copy_(tf32(grad * scale.unsqueeze(-1)))
    sqrsum_grad.copy_(-0.5 * (scale / (sqrsum + rms_eps * rms_group_size)) * (grad * out_mul).sum(dim=-1))
