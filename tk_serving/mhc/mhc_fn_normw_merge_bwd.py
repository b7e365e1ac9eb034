"""Gradients of the norm weight folded into the mixing matrix."""

from torch import Tensor

from tk_serving.compare import BITWISE, Close
from tk_serving.expect import Expect
from tk_serving.mhc._shapes import F32, MIXES, MULT, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_fn_normw_merge_bwd")


def _plan(
    grad_out: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor,
    mhc_fn_grad: Tensor | None,
    mhc_norm_weight_grad: Tensor | None,
) -> Plan:
    mixes, columns = _expect.tensor("mhc_fn", mhc_fn, F32, ("m", "4 H"))
    _expect.multiple("mhc_fn", columns, 256, "4 H columns")
    _expect.at_least("mhc_fn rows", mixes, 1)
    _expect.tensor("mhc_norm_weight", mhc_norm_weight, F32, (columns,))
    _expect.tensor("grad_out", grad_out, F32, (mixes, columns))
    _expect.same_device(grad_out=grad_out, mhc_fn=mhc_fn, mhc_norm_weight=mhc_norm_weight)
    slots = (
        result(_expect, "mhc_fn_grad", mhc_fn_grad, mhc_fn.shape, F32),
        result(_expect, "mhc_norm_weight_grad", mhc_norm_weight_grad, mhc_norm_weight.shape, F32),
    )
    given = {"accumulate_fn": mhc_fn_grad is not None, "accumulate_weight": mhc_norm_weight_grad is not None}
    launch = Launch(
        "mhc.fn_normw_merge:backward",
        {"columns": columns, **given},
        lambda outs, grad, fn, weight, *_: (rows(grad, columns), rows(fn, columns), rows(weight), outs[0], outs[1]),
        pdl=False,  # its loads have to overtake its stores
    )
    return Plan(slots, (launch,))


def _inputs(make: Maker, *, tokens: int = MIXES, hidden: int) -> tuple:
    columns = MULT * hidden
    return make.randn(MIXES, columns), make.randn(MIXES, columns), make.randn(columns)


@operator(
    spec="operators.md P35, A11",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=(BITWISE, Close(1e-5, 1e-4)) * 2,  # as results, and in the caller's tensors
    mutates=("mhc_fn_grad", "mhc_norm_weight_grad"),
    finish=owned(2),
    cases=[{"tokens": MIXES, "hidden": 192}],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
)
def mhc_fn_normw_merge_bwd(
    grad_out: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor,
    mhc_fn_grad: Tensor | None = None,
    mhc_norm_weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`mhc_fn_normw_merge_fwd`: ``grad_out w``, and the sum over rows of ``grad_out fn``.

    Args:
        grad_out: float32 [m, 4 H], contiguous.
        mhc_fn, mhc_norm_weight: the arguments of the forward pass.
        mhc_fn_grad, mhc_norm_weight_grad: tensors to *add* the gradients to; new ones by default.

    Returns:
        float32 gradients of mhc_fn and mhc_norm_weight, or the given tensors.
    """
    fn_grad, weight_grad = grad_out * mhc_norm_weight, (grad_out * mhc_fn).sum(dim=0)
    if mhc_fn_grad is not None:
        fn_grad = mhc_fn_grad + fn_grad
    if mhc_norm_weight_grad is not None:
        weight_grad = mhc_norm_weight_grad + weight_grad
    return fn_grad, weight_grad
