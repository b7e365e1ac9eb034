"""The differentiable functions P34-P40: forward and backward operators joined for autograd.

Each has the signature of the operator of its name, which itself records nothing and stays reachable with the suffix
``_fwd``. Gradients are ordinary tensors, except that those of fn, norm weight, scale and base are *added* to the
parameter's ``main_grad`` if it has one. Without gradients to record, a function is its operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tk_serving.mhc.expand_to_mhc import expand_to_mhc as _expand
from tk_serving.mhc.expand_to_mhc_bwd import expand_to_mhc_bwd
from tk_serving.mhc.mhc_fn_normw_merge_bwd import mhc_fn_normw_merge_bwd
from tk_serving.mhc.mhc_head_compute_mix import mhc_head_compute_mix as _head_mix
from tk_serving.mhc.mhc_head_compute_mix_bwd import mhc_head_compute_mix_bwd
from tk_serving.mhc.mhc_post import mhc_post as _post
from tk_serving.mhc.mhc_post_bwd import mhc_post_bwd
from tk_serving.mhc.mhc_pre_apply_mix import mhc_pre_apply_mix as _apply_mix
from tk_serving.mhc.mhc_pre_apply_mix_bwd import mhc_pre_apply_mix_bwd
from tk_serving.mhc.mhc_pre_norm_fn import mhc_pre_norm_fn as _norm_fn
from tk_serving.mhc.mhc_pre_norm_gemm import mhc_pre_norm_gemm
from tk_serving.mhc.mhc_pre_norm_gemm_bwd import mhc_pre_norm_gemm_bwd
from tk_serving.mhc.mhc_pre_split_mixes import mhc_pre_split_mixes as _split_mixes
from tk_serving.mhc.mhc_pre_split_mixes_bwd import mhc_pre_split_mixes_bwd
from tk_serving.mhc.mhc_reduce_partials_and_rmsnorm_bwd import mhc_reduce_partials_and_rmsnorm_bwd
from tk_serving.mhc.mhc_reduce_partials_and_rmsnorm_fwd import mhc_reduce_partials_and_rmsnorm_fwd
from tk_serving.mhc.mhc_sinkhorn_bwd import mhc_sinkhorn_bwd
from tk_serving.mhc.sinkhorn_normalize import sinkhorn_normalize as _sinkhorn

__all__ = [
    "expand_to_mhc",
    "mhc_head_compute_mix",
    "mhc_post",
    "mhc_pre_apply_mix",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
]


def recording(*tensors: Any) -> bool:
    """Whether autograd would record a function of these arguments."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    return _Expand.apply(hidden, mhc_mult, out) if recording(hidden) else _expand(hidden, mhc_mult, out)


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> Tensor:
    if recording(residual, mhc_fn, mhc_norm_weight):
        return _NormFn.apply(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps, n_splits)
    return _norm_fn(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps, fuse_grad_acc, n_splits)


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    function = _SplitMixes.apply if recording(input_mixes, mhc_scale, mhc_base) else _split_mixes
    return function(input_mixes, mhc_scale, mhc_base, mhc_mult, mhc_post_mult_value, mhc_pre_eps)


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    return (_Sinkhorn.apply if recording(x) else _sinkhorn)(x, repeat, eps)


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    return (_ApplyMix.apply if recording(x, mix) else _apply_mix)(x, mix, out)


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    function = _Post.apply if recording(x, residual, post_layer_mix, comb_res_mix) else _post
    return function(x, residual, post_layer_mix, comb_res_mix, out)


def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    function = _HeadMix.apply if recording(input_mix, mhc_scale, mhc_base) else _head_mix
    return function(input_mix, mhc_scale, mhc_base, mhc_pre_eps)


_PAIRS: tuple[tuple[Any, Any], ...] = (
    (expand_to_mhc, _expand),
    (mhc_pre_norm_fn, _norm_fn),
    (mhc_pre_split_mixes, _split_mixes),
    (sinkhorn_normalize, _sinkhorn),
    (mhc_pre_apply_mix, _apply_mix),
    (mhc_post, _post),
    (mhc_head_compute_mix, _head_mix),
)
for _function, _operator in _PAIRS:
    _function.__doc__ = _operator.__doc__
    _function.operator = _operator.operator


def _deliver(parameter: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The gradient as autograd shall have it: None if it went into the parameter's ``main_grad``."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or grad is None:
        return grad
    main_grad.add_(grad)
    return None


def _written(ctx: Any, out: Tensor | None) -> None:
    if out is not None:
        ctx.mark_dirty(out)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mhc_mult: int, out: Tensor | None) -> Tensor:
        _written(ctx, out)
        return _expand(hidden, mhc_mult, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return expand_to_mhc_bwd(grad.contiguous()), None, None


class _NormFn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, fn: Tensor, norm_weight: Tensor | None, eps: float, n_splits: int
    ) -> Tensor:
        mul, sqr = mhc_pre_norm_gemm(residual, fn, norm_weight, n_splits)
        splits, tokens, mixes = mul.shape
        size = fn.shape[1]
        out_mul, sqrsum, out = mul.new_empty(tokens, 1, mixes), sqr.new_empty(tokens, 1), mul.new_empty(tokens, mixes)
        mhc_reduce_partials_and_rmsnorm_fwd(mul.unsqueeze(2), sqr.unsqueeze(2), out_mul, sqrsum, out, size, eps, splits)
        ctx.save_for_backward(residual, fn, norm_weight, out_mul, sqrsum)
        ctx.parameters = (fn, norm_weight)
        ctx.eps = eps
        return out.view(*residual.shape[:-2], mixes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        residual, fn, norm_weight, out_mul, sqrsum = ctx.saved_tensors
        mul_grad, sqr_grad = torch.empty_like(out_mul), torch.empty_like(sqrsum)
        grad = grad.reshape(-1, fn.shape[0]).contiguous()
        mhc_reduce_partials_and_rmsnorm_bwd(grad, out_mul, sqrsum, mul_grad, sqr_grad, fn.shape[1], ctx.eps)
        residual_grad, fn_grad = mhc_pre_norm_gemm_bwd(
            residual, fn, norm_weight, mul_grad.squeeze(1), sqr_grad.squeeze(1)
        )
        weight_grad = None
        if norm_weight is not None:
            fn_grad, weight_grad = mhc_fn_normw_merge_bwd(fn_grad, fn, norm_weight)
        fn, norm_weight = ctx.parameters
        return residual_grad, _deliver(fn, fn_grad), _deliver(norm_weight, weight_grad), None, None


class _SplitMixes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixes: Tensor, scale: Tensor, base: Tensor, mult: int, post_mult: float, pre_eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mixes, scale, base)
        ctx.parameters = (scale, base)
        ctx.post_mult = post_mult
        return tuple(_split_mixes(mixes, scale, base, mult, post_mult, pre_eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        given = (grad.contiguous() for grad in grads)
        mixes_grad, *parameter_grads = mhc_pre_split_mixes_bwd(*given, *ctx.saved_tensors, ctx.post_mult)
        return mixes_grad, *map(_deliver, ctx.parameters, parameter_grads), None, None, None


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, repeat: int, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.repeat, ctx.eps = repeat, eps
        return _sinkhorn(x, repeat, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return mhc_sinkhorn_bwd(grad.contiguous(), *ctx.saved_tensors, ctx.repeat, ctx.eps), None, None


class _ApplyMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mix: Tensor, out: Tensor | None) -> Tensor:
        _written(ctx, out)
        ctx.save_for_backward(x, mix)
        return _apply_mix(x, mix, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return *mhc_pre_apply_mix_bwd(grad.contiguous(), *ctx.saved_tensors), None


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, out: Tensor | None) -> Tensor:
        _written(ctx, out)
        ctx.save_for_backward(x, residual, post, comb)
        return _post(x, residual, post, comb, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return *mhc_post_bwd(*ctx.saved_tensors, grad.contiguous()), None


class _HeadMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mix: Tensor, scale: Tensor, base: Tensor, pre_eps: float) -> Tensor:
        ctx.save_for_backward(mix, scale, base)
        ctx.parameters = (scale, base)
        return _head_mix(mix, scale, base, pre_eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        mix_grad, *parameter_grads = mhc_head_compute_mix_bwd(grad.contiguous(), *ctx.saved_tensors)
        return mix_grad, *map(_deliver, ctx.parameters, parameter_grads), None
