"""Gradient of the copies for the residual streams."""

from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.mhc._shapes import BF16, MULT, count, hidden, lead, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("expand_to_mhc_bwd")


def _plan(grad_out: Tensor, hidden_grad: Tensor | None) -> Plan:
    size = hidden(_expect, "grad_out", grad_out)
    tokens = lead(_expect, "grad_out", grad_out, BF16, "mhc_mult", "H")
    mult = grad_out.shape[-2]
    launch = Launch(
        "mhc.expand:backward",
        {"hidden": size, "mult": mult},
        lambda outs, grad, _: (rows(grad, mult, size), outs[0].view(-1, size)),
    )
    slot = result(_expect, "hidden_grad", hidden_grad, (*tokens, size), BF16)
    return Plan((slot,), (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int, hidden: int, mult: int = MULT) -> tuple:
    return (make.randn(tokens, mult, hidden, dtype=BF16),)


@operator(
    spec="operators.md P34, A11",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    moves_data=True,
    equality=BITWISE,
    mutates=("hidden_grad",),
    finish=owned(1),
    cases=[{"tokens": 0, "hidden": 128}, {"tokens": 5, "hidden": 192}, {"tokens": 2, "hidden": 128, "mult": 3}],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
)
def expand_to_mhc_bwd(grad_out: Tensor, *, hidden_grad: Tensor | None = None) -> Tensor:
    """Sum of the gradients of the copies, in float32 from the first stream to the last, rounded once.

    Args:
        grad_out: bfloat16 [..., mhc_mult, H], contiguous.
        hidden_grad: where to write; a new tensor by default.

    Returns:
        bfloat16 [..., H].
    """
    total = wide(grad_out[..., 0, :])
    for i in range(1, grad_out.shape[-2]):
        total = total + grad_out[..., i, :]
    return total.to(grad_out.dtype)
