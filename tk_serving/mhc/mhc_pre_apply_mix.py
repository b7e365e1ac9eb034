"""A sublayer's input: the weighted sum of the residual streams."""

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.mhc._math import weighted_sum
from tk_serving.mhc._shapes import BF16, F32, MULT, count, hidden, lead, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_apply_mix")


def _plan(x: Tensor, mix: Tensor, out: Tensor | None) -> Plan:
    size = hidden(_expect, "x", x)
    tokens = lead(_expect, "x", x, BF16, MULT, "H")
    lead(_expect, "mix", mix, F32, MULT, 1, like=tokens)
    _expect.same_device(x=x, mix=mix, out=out)
    launch = Launch(
        "mhc.apply_mix",
        {"hidden": size},
        lambda outs, x, mix, _: (rows(x, MULT, size), rows(mix, MULT), outs[0].view(-1, size)),
    )
    slot = result(_expect, "out", out, (*tokens, size), BF16)
    return Plan((slot,), (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int, hidden: int) -> tuple:
    return make.randn(tokens, MULT, hidden, dtype=BF16), make.rand(tokens, MULT, 1)


@operator(
    spec="operators.md P38",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("out",),
    finish=owned(1),
    aliases=("mhc_pre_apply_mix_fwd",),
    moves_data=True,
    cases=[{"tokens": 0, "hidden": 128}, {"tokens": 3, "hidden": 192}, {"tokens": 2, "hidden": 1280}],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum of the residual streams, each times its pre mix, in float32 by fused multiply-adds in ascending order.

    Args:
        x: bfloat16 [..., 4, H], contiguous, H a multiple of 64.
        mix: float32 [..., 4, 1], contiguous.
        out: where to write; a new tensor by default.

    Returns:
        bfloat16 [..., H], rounded to nearest even.
    """
    return weighted_sum(x, mix).to(x.dtype)
