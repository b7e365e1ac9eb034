"""Sum of the parts of a pre-norm product, scaled by the RMS."""

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._math import ascending_sum, inverse_rms
from tk_serving.mhc._partials import MAX_MIXES
from tk_serving.mhc._shapes import F32, MIXES, MULT
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_reduce_partials_and_rmsnorm_fwd")


def _plan(
    out_mul_splitted: Tensor,
    sqrsum_splitted: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> Plan:
    splits, tokens, groups, mixes = _expect.tensor("out_mul_splitted", out_mul_splitted, F32, ("s", "T", "g", "m"))
    _expect.that(1 <= mixes <= MAX_MIXES, "out_mul_splitted", f"1 to {MAX_MIXES} mixes", mixes)
    _expect.at_least("n_splits", n_splits, 1)
    _expect.that(splits == n_splits, "n_splits", f"{splits}, the parts of out_mul_splitted", n_splits)
    _expect.tensor("sqrsum_splitted", sqrsum_splitted, F32, (splits, tokens, groups))
    _expect.tensor("out_mul", out_mul, F32, (tokens, groups, mixes))
    _expect.tensor("sqrsum", sqrsum, F32, (tokens, groups))
    _expect.tensor("out", out, F32, (tokens, mixes))
    _expect.at_least("rms_group_size", rms_group_size, 1)
    _expect.same_device(
        out_mul_splitted=out_mul_splitted, sqrsum_splitted=sqrsum_splitted, out_mul=out_mul, sqrsum=sqrsum, out=out
    )
    launch = Launch(
        "mhc.reduce_partials",
        {"splits": splits, "norm_groups": groups, "mixes": mixes, "save": True},
        lambda _, mul, sqr, out_mul, sqrsum, out, size, eps, __: (mul, sqr, out_mul, sqrsum, out, float(size), eps),
    )
    return Plan((), (launch,) if tokens and groups else ())


def _inputs(make: Maker, *, tokens: int, splits: int = 16, groups: int = 1, size: int = MULT * 4096) -> tuple:
    mul = make.randn(splits, tokens, groups, MIXES)
    sqr = make.rand(splits, tokens, groups) * (2.0 * size / splits)
    empty = make.randn(tokens, groups, MIXES), make.randn(tokens, groups), make.randn(tokens, MIXES)
    return mul, sqr, *empty, size, 1e-6, splits


@operator(
    spec="operators.md A11",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=Close(1e-5, 1e-6),
    mutates=("out_mul", "sqrsum", "out"),
    cases=[{"tokens": 0}, {"tokens": 9, "splits": 4}, {"tokens": 3, "splits": 3, "groups": 2}],
    workloads=serving(lambda m: {"size": MULT * m.hidden_size} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_reduce_partials_and_rmsnorm_fwd(
    out_mul_splitted: Tensor,
    sqrsum_splitted: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """Add the parts in ascending order, and scale: ``out = sum over g of out_mul / sqrt(sqrsum / group size + eps)``.

    Args:
        out_mul_splitted, sqrsum_splitted: float32 [s, T, g, m] and [s, T, g], g norm groups (1 for mHC).
        out_mul, sqrsum, out: float32 [T, g, m], [T, g] and [T, m]; written.
        rms_group_size: values in a square sum.
        rms_eps: added to the mean square.
        n_splits: s.
    """
    mul, sqr = ascending_sum(out_mul_splitted), ascending_sum(sqrsum_splitted)
    out_mul.copy_(mul)
    sqrsum.copy_(sqr)
    scaled = mul * inverse_rms(sqr, rms_group_size, rms_eps).unsqueeze(-1)
    out.copy_(ascending_sum(scaled.transpose(0, 1)))
