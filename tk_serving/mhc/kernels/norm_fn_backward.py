"""Gradients of the pre-norm product: a thread owns two columns and passes over the tokens of its part."""

import tilelang.language as T

from tk_serving.mhc.kernels.norm_fn import tf32

THREADS = 128
COLUMNS = 2 * THREADS
STEP = 32  # tokens whose gradients are staged in shared memory at a time


def build(columns: int, mixes: int, fold: bool):
    """The residual's gradient, and the matrix's gradient in parts over the tokens."""
    tokens, parts = T.dynamic("tokens", "int64"), T.dynamic("parts", "int64")

    @T.prim_func
    def norm_fn_backward(
        x: T.Tensor((tokens, columns), "bfloat16"),
        fn: T.Tensor((mixes, columns), "float32"),
        weight: T.Tensor((columns,), "float32"),
        mul_grad: T.Tensor((tokens, mixes), "float32"),
        sqr_grad: T.Tensor((tokens,), "float32"),
        x_grad: T.Tensor((tokens, columns), "bfloat16"),
        fn_parts: T.Tensor((parts, mixes, columns), "float32"),
    ):
        with T.Kernel(columns // COLUMNS, parts, threads=THREADS) as (block, part):
            thread = T.get_thread_binding()
            column = block * COLUMNS + 2 * thread
            share = T.ceildiv(tokens, parts)
            first = T.cast(part, "int64") * share
            staged = T.alloc_shared((STEP, mixes + 1), "float32")
            pair = T.alloc_local((2,), "bfloat16")
            value = T.alloc_local((2,), "float32")
            grad = T.alloc_local((2,), "float32")
            matrix = T.alloc_local((2 * mixes,), "float32")
            total = T.alloc_local((2 * mixes,), "float32")
            for m in T.unroll(mixes):
                for v in T.vectorized(2):
                    matrix[2 * m + v] = fn[m, column + v]
                if fold:
                    for v in T.unroll(2):
                        matrix[2 * m + v] = matrix[2 * m + v] * weight[column + v]
                for v in T.unroll(2):
                    matrix[2 * m + v] = tf32(matrix[2 * m + v])
                    total[2 * m + v] = 0.0
            for step in T.serial(T.ceildiv(share, STEP)):
                start = first + T.cast(step, "int64") * STEP
                T.sync_threads()
                for i in T.serial(-(-STEP * (mixes + 1) // THREADS)):
                    entry = i * THREADS + thread
                    row = entry // (mixes + 1)
                    at = entry % (mixes + 1)
                    if row < STEP and start + row < tokens:
                        if at < mixes:
                            staged[row, at] = mul_grad[start + row, at]
                        else:
                            staged[row, at] = sqr_grad[start + row]
                T.sync_threads()
                for row in T.serial(STEP):
                    if step * STEP + row < share and start + row < tokens:
                        for v in T.vectorized(2):
                            pair[v] = x[start + row, column + v]
                        for v in T.unroll(2):
                            value[v] = T.cast(pair[v], "float32")
                            grad[v] = T.float32(2.0) * value[v] * staged[row, mixes]
                            for m in T.unroll(mixes):
                                grad[v] = T.ieee_fmaf(staged[row, m], matrix[2 * m + v], grad[v])
                                total[2 * m + v] = T.ieee_fmaf(staged[row, m], value[v], total[2 * m + v])
                        for v in T.vectorized(2):
                            pair[v] = T.cast(grad[v], "bfloat16")
                        for v in T.vectorized(2):
                            x_grad[start + row, column + v] = pair[v]
            for m in T.unroll(mixes):
                for v in T.vectorized(2):
                    fn_parts[part, m, column + v] = total[2 * m + v]

    return norm_fn_backward


def sums(columns: int, mixes: int):
    """The matrix's gradient: the parts in ascending order."""
    parts = T.dynamic("parts", "int64")

    @T.prim_func
    def norm_fn_backward_sums(
        fn_parts: T.Tensor((parts, mixes, columns), "float32"),
        fn_grad: T.Tensor((mixes, columns), "float32"),
    ):
        with T.Kernel(mixes, columns // COLUMNS, threads=THREADS) as (m, block):
            column = block * COLUMNS + 2 * T.get_thread_binding()
            total = T.alloc_local((2,), "float32")
            for v in T.vectorized(2):
                total[v] = 0.0
            for part in T.serial(parts):
                for v in T.vectorized(2):
                    total[v] = total[v] + fn_parts[part, m, column + v]
            for v in T.vectorized(2):
                fn_grad[m, column + v] = total[v]

    return norm_fn_backward_sums
