"""Pre, post and combination mixes from the raw ones."""

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._math import column_scale, sigmoid
from tk_serving.mhc._shapes import F32, MIXES, MULT, count, lead, mult, owned, result
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_split_mixes")


def _plan(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
    pre: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
) -> Plan:
    mult(_expect, "mhc_mult", mhc_mult)
    tokens = lead(_expect, "input_mixes", input_mixes, F32, MIXES)
    _expect.tensor("mhc_scale", mhc_scale, F32, (3,))
    _expect.tensor("mhc_base", mhc_base, F32, (MIXES,))
    _expect.same_device(input_mixes=input_mixes, mhc_scale=mhc_scale, mhc_base=mhc_base, pre=pre, post=post, comb=comb)
    slots = (
        result(_expect, "pre", pre, (*tokens, MULT, 1), F32),
        result(_expect, "post", post, (*tokens, MULT, 1), F32),
        result(_expect, "comb", comb, (*tokens, MULT, MULT), F32),
    )
    launch = Launch(
        "mhc.split_mixes",
        {},
        lambda outs, mixes, scale, base, _, post_mult, pre_eps, *__: (
            mixes.view(-1, MIXES),
            scale,
            base,
            outs[0].view(-1, MULT),
            outs[1].view(-1, MULT),
            outs[2].view(-1, MULT * MULT),
            post_mult,
            pre_eps,
        ),
    )
    return Plan(slots, (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int) -> tuple:
    return make.randn(tokens, MIXES), make.randn(3), make.randn(MIXES), MULT, 2.0, 1e-6


@operator(
    spec="operators.md P36",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=Close(1e-5, 2e-5),
    mutates=("pre", "post", "comb"),
    finish=owned(3),
    aliases=("mhc_pre_split_mixes_fwd",),
    cases=[{"tokens": 0}, {"tokens": 13}],
    workloads=serving(lambda m: {} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
    *,
    pre: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre, post and combination mixes from the raw ones.

    With z = mix scale[g] + base, g = 0 for columns 0-3, 1 for 4-7, 2 for 8-23: pre = sigma(z) + mhc_pre_eps,
    post = sigma(z) mhc_post_mult_value, comb = z.

    Args:
        input_mixes: float32 [..., 24], contiguous.
        mhc_scale: float32 [3].
        mhc_base: float32 [24].
        mhc_mult: 4.
        mhc_post_mult_value: factor of the post gate (2.0 in DeepSeek-V4).
        mhc_pre_eps: added to the pre gate.
        pre, post, comb: where to write; new tensors by default.

    Returns:
        pre [..., 4, 1], post [..., 4, 1], comb [..., 4, 4] (from, to), all float32.
    """
    z = input_mixes * column_scale(mhc_scale) + mhc_base
    gates = sigmoid(z[..., : 2 * MULT]).unsqueeze(-1)
    comb = z[..., 2 * MULT :].unflatten(-1, (MULT, MULT))
    return gates[..., :MULT, :] + mhc_pre_eps, gates[..., MULT:, :] * mhc_post_mult_value, comb
