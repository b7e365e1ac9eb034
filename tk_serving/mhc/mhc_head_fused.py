"""The residual streams as one, before the output head."""

from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc import _partials, _pre
from tk_serving.mhc._math import inverse_rms
from tk_serving.mhc._shapes import BF16, F32, MULT, count
from tk_serving.mhc.mhc_head_compute_mix import mhc_head_compute_mix
from tk_serving.mhc.mhc_pre_apply_mix import mhc_pre_apply_mix
from tk_serving.mhc.mhc_pre_norm_fn import mhc_pre_norm_fn
from tk_serving.operator import Out, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_head_fused")


def _plan(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    n_splits: int,
    fn_norm_weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> Plan:
    _pre.refuse_autograd(_expect.operator, residual, fn, mhc_scale, mhc_base, fn_norm_weight, norm_weight)
    tokens, size = _partials.check(
        _expect, residual, fn, fn_norm_weight, n_splits, names=("fn", "fn_norm_weight"), mixes=MULT
    )
    _expect.tensor("mhc_scale", mhc_scale, F32, (1,))
    _expect.tensor("mhc_base", mhc_base, F32, (MULT,))
    if norm_weight is not None:
        _expect.tensor("norm_weight", norm_weight, (BF16, F32), (size,))
    _expect.same_device(residual=residual, mhc_scale=mhc_scale, mhc_base=mhc_base, norm_weight=norm_weight)
    splits = _partials.num_splits(size, MULT, n_splits)
    product = _partials.launch(
        size,
        MULT,
        splits,
        lambda outs, residual, fn, *args: _partials.Tensors(residual, fn, outs[1], outs[2], args[5]),
        fold=fn_norm_weight is not None,
    )
    finish = _pre.finish(
        size,
        splits,
        _pre.Values(rms_eps, mhc_pre_eps, norm_eps=norm_eps),
        lambda outs, residual, _, scale, base, *args: _pre.Tensors(
            outs[1], outs[2], scale, base, residual, norm_weight=args[4], out=outs[0]
        ),
        mixes=MULT,
        norm_weight=norm_weight,
    )
    scratch = _partials.outputs(splits, count(tokens), MULT)
    return Plan((Out((*tokens, size), BF16),), (product, finish) if count(tokens) else (), scratch)


def _inputs(
    make: Maker, *, tokens: int, hidden: int, splits: int = 16, folded: bool = False, norm: bool = False
) -> tuple:
    return (
        make.randn(tokens, MULT, hidden, dtype=BF16),
        make.randn(MULT, MULT * hidden, scale=(MULT * hidden) ** -0.5),
        make.randn(1),
        make.randn(MULT),
        1e-6,
        1e-6,
        splits,
        make.rand(MULT * hidden) if folded else None,
        make.rand(hidden) if norm else None,
    )


@operator(
    spec="operators.md P35, P40, P38",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=Close(1e-2, 1e-2),
    moves_data=True,
    cases=[
        {"tokens": 0, "hidden": 128},
        {"tokens": 19, "hidden": 192, "splits": 2},
        {"tokens": 3, "hidden": 192, "splits": 2, "folded": True, "norm": True},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["vllm", "sglang"],
)
def mhc_head_fused(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    n_splits: int = 16,
    fn_norm_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """:func:`mhc_pre_norm_fn`, :func:`mhc_head_compute_mix` and :func:`mhc_pre_apply_mix` in two launches, same bits.

    Args:
        residual: bfloat16 [..., 4, H], contiguous, H a multiple of 64.
        fn: float32 [4, 4 H], contiguous.
        mhc_scale, mhc_base: float32 [1] and [4].
        rms_eps: added to the mean square of the residual.
        mhc_pre_eps: added to the gates.
        n_splits: upper bound of the parts in which the hidden dimension is summed. Changes last bits.
        fn_norm_weight: float32 [4 H], folded into fn.
        norm_weight: bfloat16 or float32 [H]: the RMS norm that follows, or None.
        norm_eps: of this norm.

    Returns:
        bfloat16 [..., H].

    Raises:
        RuntimeError: called where autograd would record it; it is forward only.
    """
    mixes = mhc_pre_norm_fn.operator.reference(residual, fn, fn_norm_weight, rms_eps, True, n_splits)
    mix = mhc_head_compute_mix.operator.reference(mixes, mhc_scale, mhc_base, mhc_pre_eps)
    row = mhc_pre_apply_mix.operator.reference(residual, mix.unsqueeze(-1))
    if norm_weight is None:
        return row
    value = wide(row)
    scale = inverse_rms(value.square().sum(dim=-1, keepdim=True), row.shape[-1], norm_eps)
    return (value * scale * wide(norm_weight)).to(row.dtype)
