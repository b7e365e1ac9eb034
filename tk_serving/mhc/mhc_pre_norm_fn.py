"""Raw mixes of a token: its normalised residual streams times the mixing matrix."""

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc import _partials
from tk_serving.mhc._math import ascending_sum, inverse_rms
from tk_serving.mhc._shapes import BF16, F32, MIXES, MULT, count
from tk_serving.mhc.mhc_pre_norm_gemm import mhc_pre_norm_gemm
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_norm_fn")
_NAMES = ("mhc_fn", "mhc_norm_weight")


def _plan(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool,
    n_splits: int,
) -> Plan:
    tokens, size = _partials.check(_expect, residual, mhc_fn, mhc_norm_weight, n_splits, names=_NAMES)
    mixes = mhc_fn.shape[0]
    splits = _partials.num_splits(size, mixes, n_splits)
    scale = Launch(
        "mhc.reduce_partials",
        {"splits": splits, "norm_groups": 1, "mixes": mixes, "save": False},
        lambda outs, _, __, ___, eps, *____: (
            outs[1].unsqueeze(2),
            outs[2].unsqueeze(2),
            outs[1].view(-1, 1, mixes)[:1],
            outs[2].view(-1, 1)[:1],
            outs[0].view(-1, mixes),
            float(MULT * size),
            eps,
        ),
    )
    product = _partials.launch(
        size,
        mixes,
        splits,
        lambda outs, residual, fn, weight, *_: _partials.Tensors(residual, fn, outs[1], outs[2], weight),
        fold=mhc_norm_weight is not None,
    )
    scratch = _partials.outputs(splits, count(tokens), mixes)
    return Plan((Out((*tokens, mixes), F32),), (product, scale) if count(tokens) else (), scratch)


def _inputs(
    make: Maker, *, tokens: int, hidden: int, mixes: int = MIXES, folded: bool = False, splits: int = 16
) -> tuple:
    fn = make.randn(mixes, MULT * hidden, scale=(MULT * hidden) ** -0.5)
    weight = make.rand(MULT * hidden) if folded else None
    return make.randn(tokens, MULT, hidden, dtype=BF16), fn, weight, 1e-6, True, splits


@operator(
    spec="operators.md P35",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=Close(1e-3, 1e-3),
    cases=[
        {"tokens": 0, "hidden": 128},
        {"tokens": 19, "hidden": 192, "splits": 2},
        {"tokens": 3, "hidden": 192, "mixes": 4, "folded": True, "splits": 2},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["deepgemm"],
)
def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> Tensor:
    """Raw mixes ``(x fn^T) / sqrt(mean of x^2 + eps)`` of the flattened residual x.

    fn is multiplied with the norm weight in float32, if there is one, and rounded to TF32; products are exact, sums
    float32. A row has the same bits in any batch.

    Args:
        residual: bfloat16 [..., 4, H], contiguous, H a multiple of 64.
        mhc_fn: float32 [m, 4 H], contiguous, m at most 32 (24, or 4 for the output head).
        mhc_norm_weight: float32 [4 H], or None.
        mhc_norm_eps: added to the mean square.
        fuse_grad_acc: accepted and without effect: gradients are always returned.
        n_splits: upper bound of the parts in which the hidden dimension is summed. Changes last bits.

    Returns:
        float32 [..., m].
    """
    mul, sqr = mhc_pre_norm_gemm.operator.reference(residual, mhc_fn, mhc_norm_weight, n_splits)
    scale = inverse_rms(ascending_sum(sqr), MULT * residual.shape[-1], mhc_norm_eps)
    return (ascending_sum(mul) * scale.unsqueeze(-1)).reshape(*residual.shape[:-2], mhc_fn.shape[0])
