"""Gates of the raw mixes, one thread for each, and their gradients with sums over tokens in a fixed order.

``columns`` is 24 for a sublayer, or 4 for the output head, which has pre mixes only.
"""

import tilelang.language as T

from tk_serving.mhc.kernels.mixes import MIXES, MULT, activate, scale_index, sigmoid

THREADS = 256
ROWS = 8  # tokens that a block of the backward pass works on at a time


def build():
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def split_mixes(
        mixes: T.Tensor((tokens, MIXES), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((MIXES,), "float32"),
        pre: T.Tensor((tokens, MULT), "float32"),
        post: T.Tensor((tokens, MULT), "float32"),
        comb: T.Tensor((tokens, MULT * MULT), "float32"),
        post_mult: T.float32,
        pre_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens * MIXES, THREADS), threads=THREADS) as block:
            entry = T.cast(block, "int64") * THREADS + T.get_thread_binding()
            token = entry // MIXES
            column = T.cast(entry % MIXES, "int32")
            value = T.alloc_local((1,), "float32")
            if token < tokens:
                z = mixes[token, column] * scale[scale_index(column)] + base[column]
                value[0] = activate(column, z, pre_eps, post_mult)
                if column < MULT:
                    pre[token, column] = value[0]
                elif column < 2 * MULT:
                    post[token, column - MULT] = value[0]
                else:
                    comb[token, column - 2 * MULT] = value[0]

    return split_mixes


def head():
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def head_mix(
        mixes: T.Tensor((tokens, MULT), "float32"),
        scale: T.Tensor((1,), "float32"),
        base: T.Tensor((MULT,), "float32"),
        out: T.Tensor((tokens, MULT), "float32"),
        pre_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens * MULT, THREADS), threads=THREADS) as block:
            entry = T.cast(block, "int64") * THREADS + T.get_thread_binding()
            token = entry // MULT
            column = entry % MULT
            if token < tokens:
                out[token, column] = sigmoid(mixes[token, column] * scale[0] + base[column]) + pre_eps

    return head_mix


@T.macro
def gate_gradient(grad, column, z, post_mult, out):
    """out[0] = the gradient of z for that of the column's mix."""
    gate = T.alloc_local((1,), "float32")
    gate[0] = sigmoid(z)
    slope = T.if_then_else(column < MULT, T.float32(1.0), post_mult) * (gate[0] * (T.float32(1.0) - gate[0]))
    out[0] = T.if_then_else(column < 2 * MULT, grad * slope, grad)


def backward(columns: int):
    """Gradients of the mixes, and for each block the sums over its tokens that make those of base and scale."""
    groups = 3 if columns == MIXES else 1
    threads = ROWS * columns
    comb_width = MULT * MULT if columns == MIXES else MULT  # not read for the head
    tokens, parts = T.dynamic("tokens", "int64"), T.dynamic("parts", "int64")

    @T.prim_func
    def split_mixes_backward(
        pre_grad: T.Tensor((tokens, MULT), "float32"),
        post_grad: T.Tensor((tokens, MULT), "float32"),
        comb_grad: T.Tensor((tokens, comb_width), "float32"),
        mixes: T.Tensor((tokens, columns), "float32"),
        scale: T.Tensor((groups,), "float32"),
        base: T.Tensor((columns,), "float32"),
        mixes_grad: T.Tensor((tokens, columns), "float32"),
        base_parts: T.Tensor((parts, columns), "float32"),
        scale_parts: T.Tensor((parts, columns), "float32"),
        post_mult: T.float32,
    ):
        with T.Kernel(parts, threads=threads) as block:
            thread = T.get_thread_binding()
            row = thread // columns
            column = thread % columns
            sums = T.alloc_shared((ROWS, 2, columns), "float32")
            of_base = T.alloc_local((1,), "float32")
            of_scale = T.alloc_local((1,), "float32")
            grad = T.alloc_local((1,), "float32")
            of_base[0] = 0.0
            of_scale[0] = 0.0
            factor = scale[scale_index(column)]
            share = T.ceildiv(tokens, parts)
            for i in T.serial(T.ceildiv(share, ROWS)):
                within = T.cast(i, "int64") * ROWS + row
                token = T.cast(block, "int64") * share + within
                if within < share and token < tokens:
                    if column < MULT:
                        grad[0] = pre_grad[token, column]
                    elif column < 2 * MULT:
                        grad[0] = post_grad[token, column - MULT]
                    else:
                        grad[0] = comb_grad[token, column - 2 * MULT]
                    mix = mixes[token, column]
                    gate_gradient(grad[0], column, mix * factor + base[column], post_mult, grad)
                    mixes_grad[token, column] = grad[0] * factor
                    of_base[0] = of_base[0] + grad[0]
                    of_scale[0] = T.ieee_fmaf(grad[0], mix, of_scale[0])
            sums[row, 0, column] = of_base[0]
            sums[row, 1, column] = of_scale[0]
            T.sync_threads()
            if row == 0:
                for r in T.unroll(1, ROWS):
                    of_base[0] = of_base[0] + sums[r, 0, column]
                    of_scale[0] = of_scale[0] + sums[r, 1, column]
                base_parts[block, column] = of_base[0]
                scale_parts[block, column] = of_scale[0]

    return split_mixes_backward


def backward_sums(columns: int):
    """Gradients of base and scale from the sums of the blocks, added in ascending order."""
    groups = 3 if columns == MIXES else 1
    parts = T.dynamic("parts", "int64")

    @T.prim_func
    def split_mixes_backward_sums(
        base_parts: T.Tensor((parts, columns), "float32"),
        scale_parts: T.Tensor((parts, columns), "float32"),
        base_grad: T.Tensor((columns,), "float32"),
        scale_grad: T.Tensor((groups,), "float32"),
    ):
        with T.Kernel(1, threads=32) as _:
            column = T.get_thread_binding()
            shared = T.alloc_shared((columns,), "float32")
            of_base = T.alloc_local((1,), "float32")
            of_scale = T.alloc_local((1,), "float32")
            of_base[0] = 0.0
            of_scale[0] = 0.0
            if column < columns:
                for part in T.serial(parts):
                    of_base[0] = of_base[0] + base_parts[part, column]
                    of_scale[0] = of_scale[0] + scale_parts[part, column]
                base_grad[column] = of_base[0]
                shared[column] = of_scale[0]
            T.sync_threads()
            if column < groups:
                of_scale[0] = 0.0
                for c in T.serial(columns):
                    if scale_index(c) == column:
                        of_scale[0] = of_scale[0] + shared[c]
                scale_grad[column] = of_scale[0]

    return split_mixes_backward_sums
