"""The norm weight folded into the mixing matrix."""

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.mhc._shapes import F32, MIXES, MULT, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_fn_normw_merge_fwd")


def _plan(mhc_fn: Tensor, mhc_norm_weight: Tensor, out: Tensor | None) -> Plan:
    mixes, columns = _expect.tensor("mhc_fn", mhc_fn, F32, ("m", "4 H"))
    _expect.multiple("mhc_fn", columns, 256, "4 H columns")
    _expect.tensor("mhc_norm_weight", mhc_norm_weight, F32, (columns,))
    _expect.same_device(mhc_fn=mhc_fn, mhc_norm_weight=mhc_norm_weight, out=out)
    launch = Launch(
        "mhc.fn_normw_merge",
        {"columns": columns},
        lambda outs, fn, weight, _: (rows(fn, columns), rows(weight), outs[0]),
        pdl=False,  # 2.3 and 2.8 us late, 2.7 and 3.6 early (H 5120 and 7168 on an H200); why is not known
    )
    return Plan((result(_expect, "out", out, mhc_fn.shape, F32),), (launch,) if mixes else ())


def _inputs(make: Maker, *, tokens: int = MIXES, hidden: int) -> tuple:
    return make.randn(MIXES, MULT * hidden), make.randn(MULT * hidden)


@operator(
    spec="operators.md P35, A11",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("out",),
    finish=owned(1),
    cases=[{"tokens": MIXES, "hidden": 192}],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_fn_normw_merge_fwd(mhc_fn: Tensor, mhc_norm_weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Each row of the mixing matrix times the norm weight, in float32.

    Args:
        mhc_fn: float32 [m, 4 H], contiguous.
        mhc_norm_weight: float32 [4 H].
        out: where to write; a new tensor by default.

    Returns:
        float32 [m, 4 H].
    """
    return mhc_fn * mhc_norm_weight
