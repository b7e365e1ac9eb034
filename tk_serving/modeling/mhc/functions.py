"""The steps of a model with hyper-connections, differentiable, and fused where nothing is recorded."""

from __future__ import annotations

from torch import Tensor

from tk_serving.mhc.differentiable import recording
from tk_serving.mhc.mhc_head_fused import mhc_head_fused
from tk_serving.modeling.mhc import ops


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """The embedding of each token as the start of every residual stream: bfloat16 [..., H] to [..., mhc_mult, H]."""
    return ops.expand_to_mhc(x, mhc_mult)


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Input of a sublayer, and the mixes for :func:`mhc_post` after it.

    Both paths, with gradients and without, give the same bits. Mind two traps: the defaults of ``post_mult_value`` and
    ``sinkhorn_repeat`` are not DeepSeek-V4's (2.0 and 20), and the order ``scale, base`` is the reverse of that in
    Hugging Face's implementation. Gradients of parameters with a ``main_grad`` are added to it.

    Args:
        residual: bfloat16 [..., 4, H], contiguous, H a multiple of 64.
        fn: float32 [24, 4 H].
        scale, base: float32 [3] and [24].
        norm_weight: float32 [4 H], multiplied into fn.
        norm_eps: added to the mean square of the residual.
        mhc_mult: 4.
        post_mult_value: factor of the post gates.
        pre_eps: added to the pre gates.
        sinkhorn_eps, sinkhorn_repeat: eps and iterations of Sinkhorn.
        n_splits: parts in which the hidden dimension is summed, at most, but at least H / 128.

    Returns:
        (layer_input bfloat16 [..., H], (post float32 [..., 4, 1], comb float32 [..., 4, 4])).
    """
    if not recording(residual, fn, scale, base, norm_weight):
        post, comb, layer_input = ops.mhc_pre_big_fuse(
            residual,
            fn,
            scale,
            base,
            norm_eps,
            pre_eps,
            sinkhorn_eps,
            post_mult_value,
            sinkhorn_repeat,
            n_splits,
            norm_weight=norm_weight,
        )
        return layer_input, (post, comb)
    mixes = ops.mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps, n_splits=n_splits)
    pre, post, comb = ops.mhc_pre_split_mixes(mixes, scale, base, mhc_mult, post_mult_value, pre_eps)
    comb = ops.sinkhorn_normalize(comb, sinkhorn_repeat, sinkhorn_eps)
    return ops.mhc_pre_apply_mix(residual, pre), (post, comb)


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
) -> Tensor:
    """The residual streams as one, before the final norm and the output head.

    Args:
        residual: bfloat16 [..., 4, H], contiguous, H a multiple of 64.
        fn: float32 [4, 4 H]; of 24 rows the first four count.
        scale: float32 [1] or a scalar tensor.
        base: float32 [4]; of 24 values the first four count.
        norm_weight: float32 [4 H], multiplied into fn.
        norm_eps: added to the mean square of the residual.
        mhc_mult: 4.
        pre_eps: added to the gates.
        n_splits: parts in which the hidden dimension is summed, at most, but at least H / 128.

    Returns:
        bfloat16 [..., H].
    """
    fn, base = _first(fn, mhc_mult), _first(base, mhc_mult)
    scale = scale if scale.shape == (1,) else scale.reshape(-1)[:1]
    if not recording(residual, fn, scale, base, norm_weight):
        return mhc_head_fused(residual, fn, scale, base, norm_eps, pre_eps, n_splits, norm_weight)
    mixes = ops.mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps, n_splits=n_splits)
    mix = ops.mhc_head_compute_mix(mixes, scale, base, pre_eps)
    return ops.mhc_pre_apply_mix(residual, mix.unsqueeze(-1))


def _first(parameter: Tensor, rows: int) -> Tensor:
    """The parameter itself where it has no more rows, so that it keeps its ``main_grad``."""
    return parameter if parameter.shape[0] <= rows else parameter[:rows]
