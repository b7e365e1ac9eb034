"""Everything before a sublayer in one call: its input, and the mixes of its residual update."""

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc import _partials, _pre
from tk_serving.mhc._shapes import BF16, F32, MIXES, MULT, count
from tk_serving.mhc.mhc_pre_apply_mix import mhc_pre_apply_mix
from tk_serving.mhc.mhc_pre_norm_fn import mhc_pre_norm_fn
from tk_serving.mhc.mhc_pre_split_mixes import mhc_pre_split_mixes
from tk_serving.mhc.sinkhorn_normalize import sinkhorn_normalize
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_big_fuse")


def _plan(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int,
    norm_weight: Tensor | None,
    with_pre_mix: bool,
) -> Plan:
    _pre.refuse_autograd(_expect.operator, residual, fn, mhc_scale, mhc_base, norm_weight)
    tokens, size = _partials.check(_expect, residual, fn, norm_weight, n_splits, mixes=MIXES)
    _pre.check_gates(_expect, mhc_scale, mhc_base, sinkhorn_repeat)
    _expect.same_device(residual=residual, mhc_scale=mhc_scale, mhc_base=mhc_base)
    splits = _partials.num_splits(size, MIXES, n_splits)
    outputs = (
        *_pre.mix_outputs(tokens),
        Out((*tokens, size), BF16),
        Out((*tokens, MULT, 1), F32) if with_pre_mix else None,
    )
    early = _partials.launches_early(size, count(tokens))
    launches: tuple[Launch, ...] = (
        _partials.launch(
            size,
            MIXES,
            splits,
            lambda outs, residual, fn, *args: _partials.Tensors(residual, fn, outs[4], outs[5], args[8]),
            fold=norm_weight is not None,
            pdl=early,
        ),
        _pre.finish(
            size,
            splits,
            _pre.Values(rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat),
            lambda outs, residual, _, scale, base, *__: _pre.Tensors(
                outs[4], outs[5], scale, base, residual, pre=outs[3], post=outs[0], comb=outs[1], out=outs[2]
            ),
            with_pre=with_pre_mix,
            pdl=early,
        ),
    )
    return Plan(outputs, launches if count(tokens) else (), _partials.outputs(splits, count(tokens), MIXES))


def _inputs(make: Maker, *, tokens: int, hidden: int, folded: bool = False, splits: int = 16) -> tuple:
    return (
        make.randn(tokens, MULT, hidden, dtype=BF16),
        make.randn(MIXES, MULT * hidden, scale=(MULT * hidden) ** -0.5),
        make.randn(3),
        make.randn(MIXES),
        1e-6,
        1e-6,
        1e-6,
        2.0,
        20,
        splits,
        make.rand(MULT * hidden) if folded else None,
        folded,
    )


def _finish(results: tuple, *args: object) -> tuple:
    return tuple(results) if args[-1] else tuple(results[:3])


@operator(
    spec="operators.md P41",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=(Close(1e-3, 1e-3), Close(1e-3, 1e-3), Close(1e-2, 1e-3), Close(1e-3, 1e-3)),
    finish=_finish,
    cases=[
        {"tokens": 0, "hidden": 128},
        {"tokens": 11, "hidden": 192, "splits": 2},
        {"tokens": 3, "hidden": 192, "folded": True, "splits": 2},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["vllm", "sglang"],
)
def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
    *,
    norm_weight: Tensor | None = None,
    with_pre_mix: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Input of a sublayer, and the mixes with which :func:`mhc_post` updates the residual streams after it.

    The same bits as :func:`mhc_pre_norm_fn`, :func:`mhc_pre_split_mixes`, :func:`sinkhorn_normalize` and
    :func:`mhc_pre_apply_mix` one after the other, with the same ``n_splits``.

    Args:
        residual: bfloat16 [..., 4, H], contiguous, H a multiple of 64.
        fn: float32 [24, 4 H], contiguous.
        mhc_scale, mhc_base: float32 [3] and [24].
        rms_eps: added to the mean square of the residual.
        mhc_pre_eps: added to the pre gates.
        mhc_sinkhorn_eps, sinkhorn_repeat: eps and iterations of Sinkhorn (20 in DeepSeek-V4).
        mhc_post_mult_value: factor of the post gates (2.0 in DeepSeek-V4).
        n_splits: upper bound of the parts in which the hidden dimension is summed. Changes last bits.
        norm_weight: float32 [4 H], folded into fn.
        with_pre_mix: also return the pre mixes, which the next sublayer uses where the pre mix is delayed.

    Returns:
        post float32 [..., 4, 1], comb float32 [..., 4, 4] after Sinkhorn, layer input bfloat16 [..., H]; with
        ``with_pre_mix`` also pre float32 [..., 4, 1].

    Raises:
        RuntimeError: called where autograd would record it; it is forward only.
    """
    mixes = mhc_pre_norm_fn.operator.reference(residual, fn, norm_weight, rms_eps, True, n_splits)
    pre, post, comb = mhc_pre_split_mixes.operator.reference(
        mixes, mhc_scale, mhc_base, MULT, mhc_post_mult_value, mhc_pre_eps
    )
    comb = sinkhorn_normalize.operator.reference(comb, sinkhorn_repeat, mhc_sinkhorn_eps)
    return post, comb, mhc_pre_apply_mix.operator.reference(residual, pre), pre if with_pre_mix else None
