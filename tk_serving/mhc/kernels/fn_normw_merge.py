"""The norm weight folded into the mixing matrix, and the gradients of both; a thread owns four columns."""

import tilelang.language as T

THREADS = 64
COLUMNS = 4 * THREADS


def build(columns: int):
    mixes = T.dynamic("mixes")

    @T.prim_func
    def fn_normw_merge(
        fn: T.Tensor((mixes, columns), "float32"),
        weight: T.Tensor((columns,), "float32"),
        out: T.Tensor((mixes, columns), "float32"),
    ):
        with T.Kernel(columns // COLUMNS, mixes, threads=THREADS) as (block, m):
            column = block * COLUMNS + 4 * T.get_thread_binding()
            for v in T.vectorized(4):
                out[m, column + v] = fn[m, column + v] * weight[column + v]

    return fn_normw_merge


def backward(columns: int, accumulate_fn: bool, accumulate_weight: bool):
    """``accumulate_*``: add to what the result holds instead of overwriting it."""
    mixes = T.dynamic("mixes")

    @T.prim_func
    def fn_normw_merge_backward(
        grad: T.Tensor((mixes, columns), "float32"),
        fn: T.Tensor((mixes, columns), "float32"),
        weight: T.Tensor((columns,), "float32"),
        fn_grad: T.Tensor((mixes, columns), "float32"),
        weight_grad: T.Tensor((columns,), "float32"),
    ):
        with T.Kernel(columns // COLUMNS, threads=THREADS) as block:
            column = block * COLUMNS + 4 * T.get_thread_binding()
            g = T.alloc_local((4,), "float32")
            factor = T.alloc_local((4,), "float32")
            result = T.alloc_local((4,), "float32")
            total = T.alloc_local((4,), "float32")
            for v in T.vectorized(4):
                factor[v] = weight[column + v]
            for v in T.vectorized(4):
                total[v] = 0.0
            for m in T.serial(mixes):
                for v in T.vectorized(4):
                    g[v] = grad[m, column + v]
                for v in T.vectorized(4):
                    result[v] = fn[m, column + v]
                for v in T.unroll(4):
                    total[v] = T.ieee_fmaf(g[v], result[v], total[v])
                    result[v] = g[v] * factor[v]
                if accumulate_fn:
                    for v in T.vectorized(4):
                        result[v] = fn_grad[m, column + v] + result[v]
                for v in T.vectorized(4):
                    fn_grad[m, column + v] = result[v]
            if accumulate_weight:
                for v in T.vectorized(4):
                    total[v] = weight_grad[column + v] + total[v]
            for v in T.vectorized(4):
                weight_grad[column + v] = total[v]

    return fn_normw_merge_backward
