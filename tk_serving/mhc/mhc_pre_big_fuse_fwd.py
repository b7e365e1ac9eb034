"""A sublayer's input and the mixes of its residual update, behind an external pre-norm GEMM."""

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.mhc import _pre
from tk_serving.mhc._math import ascending_sum, inverse_rms
from tk_serving.mhc._shapes import BF16, F32, MIXES, MULT, hidden, lead
from tk_serving.mhc.mhc_pre_apply_mix import mhc_pre_apply_mix
from tk_serving.mhc.mhc_pre_split_mixes import mhc_pre_split_mixes
from tk_serving.mhc.sinkhorn_normalize import sinkhorn_normalize
from tk_serving.operator import Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_pre_big_fuse_fwd")


def _plan(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int,
) -> Plan:
    size = hidden(_expect, "residual", residual)
    sizes = lead(_expect, "residual", residual, BF16, MULT, "H")
    tokens = residual.numel() // (MULT * size)
    splits, _, _ = _expect.tensor("gemm_out_mul", gemm_out_mul, F32, ("s", tokens, MIXES))
    _expect.that(splits == n_splits, "n_splits", f"{splits}, the parts of gemm_out_mul", n_splits)
    _expect.at_least("n_splits", n_splits, 1)
    _expect.tensor("gemm_out_sqrsum", gemm_out_sqrsum, F32, (splits, tokens))
    _pre.check_gates(_expect, mhc_scale, mhc_base, sinkhorn_repeat)
    lead(_expect, "post_mix", post_mix, F32, MULT, 1, like=sizes)
    lead(_expect, "comb_mix", comb_mix, F32, MULT, MULT, like=sizes)
    lead(_expect, "layer_input", layer_input, BF16, size, like=sizes)
    _expect.same_device(
        gemm_out_mul=gemm_out_mul,
        gemm_out_sqrsum=gemm_out_sqrsum,
        mhc_scale=mhc_scale,
        mhc_base=mhc_base,
        residual=residual,
        post_mix=post_mix,
        comb_mix=comb_mix,
        layer_input=layer_input,
    )
    launch = _pre.finish(
        size,
        splits,
        _pre.Values(rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat),
        lambda _, mul, sqr, scale, base, residual, post, comb, out, *__: _pre.Tensors(
            mul, sqr, scale, base, residual, post=post, comb=comb, out=out
        ),
    )
    refusal = None if aligned(layer_input.view(-1)) else "layer_input does not start on 16 bytes"
    return Plan((), (launch,) if tokens else (), refusal=refusal if tokens else None)


def _inputs(make: Maker, *, tokens: int, hidden: int, splits: int = 16) -> tuple:
    sqr = make.rand(splits, tokens) * (MULT * hidden * 2 / splits)
    return (
        make.randn(splits, tokens, MIXES),
        make.value(sqr) if tokens else sqr,
        make.randn(3),
        make.randn(MIXES),
        make.randn(tokens, MULT, hidden, dtype=BF16),
        make.randn(tokens, MULT, 1),
        make.randn(tokens, MULT, MULT),
        make.randn(tokens, hidden, dtype=BF16),
        1e-6,
        1e-6,
        1e-6,
        2.0,
        20,
        splits,
    )


@operator(
    spec="operators.md A11",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=(Close(1e-5, 2e-5), Close(1e-4, 1e-6), Close(1e-2, 1e-3)),
    mutates=("post_mix", "comb_mix", "layer_input"),
    cases=[{"tokens": 0, "hidden": 128}, {"tokens": 11, "hidden": 192, "splits": 3}, {"tokens": 1, "hidden": 2560}],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_pre_big_fuse_fwd(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """:func:`mhc_pre_big_fuse` without its matrix product: for an engine whose GEMM delivers the parts.

    Parts are added in ascending order.

    Args:
        gemm_out_mul, gemm_out_sqrsum: float32 [s, T, 24] and [s, T], parts of the products and square sums.
        mhc_scale, mhc_base: float32 [3] and [24].
        residual: bfloat16 [..., 4, H], contiguous, T tokens.
        post_mix, comb_mix, layer_input: float32 [..., 4, 1], float32 [..., 4, 4] and bfloat16 [..., H]; written.
        rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat: as in :func:`mhc_pre_big_fuse`.
        n_splits: s.
    """
    scale = inverse_rms(ascending_sum(gemm_out_sqrsum), MULT * residual.shape[-1], rms_eps)
    mixes = ascending_sum(gemm_out_mul) * scale.unsqueeze(-1)
    pre, post, comb = mhc_pre_split_mixes.operator.reference(
        mixes.view(*residual.shape[:-2], MIXES), mhc_scale, mhc_base, MULT, mhc_post_mult_value, mhc_pre_eps
    )
    post_mix.copy_(post)
    comb_mix.copy_(sinkhorn_normalize.operator.reference(comb, sinkhorn_repeat, mhc_sinkhorn_eps))
    layer_input.copy_(mhc_pre_apply_mix.operator.reference(residual, pre))
