"""Sums over the splits of the pre-norm products, their RMS scaling, and its gradient."""

import tilelang.language as T

from tk_serving.mhc.kernels.mixes import inverse_rms
from tk_serving.mhc.kernels.norm_fn import tf32

THREADS = 128


def build(splits: int, norm_groups: int, mixes: int, save: bool):
    """One thread for each mix of a token. ``save`` also writes the sums, which the backward pass needs."""
    tokens = T.dynamic("tokens", "int64")
    saved = tokens if save else 1  # a placeholder

    @T.macro
    def scaled_sum(partial_mul, partial_sqr, token, column, group_size, eps, out_mul, sqrsum, out):
        sums = T.alloc_local((2,), "float32")
        total = T.alloc_local((1,), "float32")
        total[0] = 0.0
        for group in T.unroll(norm_groups):
            sums[0] = partial_mul[0, token, group, column]
            sums[1] = partial_sqr[0, token, group]
            for split in T.unroll(1, splits):
                sums[0] = sums[0] + partial_mul[split, token, group, column]
                sums[1] = sums[1] + partial_sqr[split, token, group]
            scaled = sums[0] * inverse_rms(sums[1], group_size, eps)
            total[0] = scaled if norm_groups == 1 else total[0] + scaled
            if save:
                out_mul[token, group, column] = sums[0]
                if column == 0:
                    sqrsum[token, group] = sums[1]
        out[token, column] = total[0]

    @T.prim_func
    def reduce_partials(
        partial_mul: T.Tensor((splits, tokens, norm_groups, mixes), "float32"),
        partial_sqr: T.Tensor((splits, tokens, norm_groups), "float32"),
        out_mul: T.Tensor((saved, norm_groups, mixes), "float32"),
        sqrsum: T.Tensor((saved, norm_groups), "float32"),
        out: T.Tensor((tokens, mixes), "float32"),
        group_size: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens * mixes, THREADS), threads=THREADS) as block:
            entry = T.cast(block, "int64") * THREADS + T.get_thread_binding()
            token = entry // mixes
            if token < tokens:
                scaled_sum(partial_mul, partial_sqr, token, entry % mixes, group_size, eps, out_mul, sqrsum, out)

    return reduce_partials


def backward(norm_groups: int, mixes: int):
    """One warp for each token and norm group, one lane for each mix."""
    warps = THREADS // 32
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def reduce_partials_backward(
        grad: T.Tensor((tokens, mixes), "float32"),
        mul: T.Tensor((tokens, norm_groups, mixes), "float32"),
        sqrsum: T.Tensor((tokens, norm_groups), "float32"),
        mul_grad: T.Tensor((tokens, norm_groups, mixes), "float32"),
        sqrsum_grad: T.Tensor((tokens, norm_groups), "float32"),
        group_size: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens * norm_groups, warps), threads=THREADS) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            item = T.cast(block, "int64") * warps + thread // 32
            token = item // norm_groups
            group = item % norm_groups
            g = T.alloc_local((1,), "float32")
            dot = T.alloc_local((1,), "float32")
            g[0] = 0.0
            dot[0] = 0.0
            if token < tokens:
                total = sqrsum[token, group]
                scale = inverse_rms(total, group_size, eps)
                if lane < mixes:
                    g[0] = grad[token, lane]
                    dot[0] = g[0] * mul[token, group, lane]
                    mul_grad[token, group, lane] = tf32(g[0] * scale)
                for step in T.unroll(5):
                    dot[0] = dot[0] + T.shfl_xor(dot[0], 16 >> step)
                if lane == 0:
                    sqrsum_grad[token, group] = T.float32(-0.5) * (scale / (total + eps * group_size)) * dot[0]

    return reduce_partials_backward
