"""Mix of the residual streams for the output head."""

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._math import sigmoid
from tk_serving.mhc._shapes import F32, MULT, count, lead, owned, result
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_head_compute_mix")


def _plan(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float, out: Tensor | None) -> Plan:
    tokens = lead(_expect, "input_mix", input_mix, F32, MULT)
    _expect.tensor("mhc_scale", mhc_scale, F32, (1,))
    _expect.tensor("mhc_base", mhc_base, F32, (MULT,))
    _expect.same_device(input_mix=input_mix, mhc_scale=mhc_scale, mhc_base=mhc_base, out=out)
    launch = Launch(
        "mhc.split_mixes:head",
        {},
        lambda outs, mix, scale, base, eps, _: (mix.view(-1, MULT), scale, base, outs[0].view(-1, MULT), eps),
    )
    return Plan((result(_expect, "out", out, input_mix.shape, F32),), (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int) -> tuple:
    return make.randn(tokens, MULT), make.randn(1), make.randn(MULT), 1e-6


@operator(
    spec="operators.md P40",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=Close(1e-4, 1e-5),
    mutates=("out",),
    finish=owned(1),
    aliases=("mhc_head_compute_mix_fwd",),
    cases=[{"tokens": 0}, {"tokens": 70}],
    workloads=serving(lambda m: {} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_head_compute_mix(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float, *, out: Tensor | None = None
) -> Tensor:
    """Mix of the residual streams for the output head: sigma(input_mix mhc_scale + mhc_base) + mhc_pre_eps.

    Args:
        input_mix: float32 [..., 4], contiguous.
        mhc_scale: float32 [1].
        mhc_base: float32 [4].
        mhc_pre_eps: added to the gate.
        out: where to write; a new tensor by default.

    Returns:
        float32 [..., 4].
    """
    return sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps
