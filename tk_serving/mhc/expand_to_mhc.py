"""Copies of the hidden state, one for each residual stream."""

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.mhc._shapes import BF16, MULT, count, hidden, lead, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("expand_to_mhc")


def _plan(hidden_states: Tensor, mhc_mult: int, out: Tensor | None) -> Plan:
    size = hidden(_expect, "hidden", hidden_states)
    tokens = lead(_expect, "hidden", hidden_states, BF16, "H")
    _expect.at_least("mhc_mult", mhc_mult, 1)
    launch = Launch(
        "mhc.expand",
        {"hidden": size, "mult": mhc_mult},
        lambda outs, x, *_: (rows(x, size), outs[0].view(-1, mhc_mult, size)),
    )
    slot = result(_expect, "out", out, (*tokens, mhc_mult, size), BF16)
    return Plan((slot,), (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int, hidden: int, mult: int = MULT) -> tuple:
    return make.randn(tokens, hidden, dtype=BF16), mult


@operator(
    spec="operators.md P34",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    moves_data=True,
    equality=BITWISE,
    mutates=("out",),
    finish=owned(1),
    aliases=("expand_to_mhc_fwd",),
    cases=[
        {"tokens": 0, "hidden": 128},
        {"tokens": 3, "hidden": 192},
        {"tokens": 5, "hidden": 1280},
        {"tokens": 2, "hidden": 128, "mult": 3},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """The hidden state of each token once for every residual stream.

    Args:
        hidden: bfloat16 [..., H], contiguous, H a multiple of 64.
        mhc_mult: number of streams, at least 1.
        out: where to write; a new tensor by default.

    Returns:
        bfloat16 [..., mhc_mult, H].
    """
    return hidden.unsqueeze(-2).expand(*hidden.shape[:-1], mhc_mult, hidden.shape[-1]).contiguous()
