"""Gradients of the pre-norm product, both on the tensor cores in TF32.

A block owns a slice of the columns and passes over the tokens of its part, eight at a time; a warp owns 64 columns.
A lane reads 16 bytes of two tokens. With the tokens as one dimension of both products and the columns as the other,
these words *are* its fragments of the one product and its results of the other, in an order of rows and columns that is
chosen to fit. Nothing is transposed, and the part's gradient of the matrix never leaves the registers.
"""

import tilelang.language as T

from tk_serving.mhc.kernels.norm_fn import tf32
from tk_serving.mhc.kernels.words import VALUES, pack

THREADS = 128
SUM_COLUMNS = 2 * THREADS
COLUMNS = THREADS // 32 * 64
TILE = 16  # tokens on their way together


def build(columns: int, mixes: int, fold: bool, stages: int = 6, resident: int = 2):
    """The residual's gradient, and the matrix's gradient in parts over the tokens."""
    tokens, parts = T.dynamic("tokens", "int64"), T.dynamic("parts", "int64")
    words = columns // VALUES
    blocks = -(-mixes // 8)  # of eight mixes
    row = blocks * 8 + 4  # of a token in shared memory; the banks of neighbouring tokens lie apart
    f32 = "float32"

    def copy_value(shared, source, present):
        return T.evaluate(T.call_extern("handle", "tl::cp_async_gs_conditional<4>", shared, source, present))

    @T.macro
    def fetch(x, mul_grad, sqr_grad, ring, grads, squares, slot, start, end, last, column, thread):
        """Start the copy of a tile; what lies past the end of the part becomes zero."""
        lane = thread % 32
        for i in T.unroll(TILE // 4):
            token = start + i // 2 * 8 + lane % 4 * 2 + i % 2
            T.evaluate(
                T.call_extern(
                    "handle",
                    "tl::cp_async_gs_conditional<16>",
                    T.address_of(ring[slot, i, thread, 0]),
                    T.address_of(x[T.min(token, last), column]),
                    token < end,
                )
            )
        for i in T.unroll(-(-TILE * mixes // THREADS)):
            entry = i * THREADS + thread
            token = start + entry // mixes
            if entry < TILE * mixes:
                copy_value(
                    T.address_of(grads[slot, entry // mixes, entry % mixes]),
                    T.address_of(mul_grad[T.min(token, last), entry % mixes]),
                    token < end,
                )
        if thread < TILE:
            copy_value(
                T.address_of(squares[slot, thread]),
                T.address_of(sqr_grad[T.min(start + thread, last)]),
                start + thread < end,
            )

    @T.prim_func
    def norm_fn_backward(
        x: T.Tensor((tokens, columns), "bfloat16"),
        fn: T.Tensor((mixes, columns), f32),
        weight: T.Tensor((columns,), f32),
        mul_grad: T.Tensor((tokens, mixes), f32),
        sqr_grad: T.Tensor((tokens,), f32),
        x_grad: T.Tensor((tokens, columns), "bfloat16"),
        fn_parts: T.Tensor((parts, mixes, columns), f32),
    ):
        with T.Kernel(columns // COLUMNS, parts, threads=THREADS) as (block, part):
            T.annotate_min_blocks_per_sm(resident)
            thread = T.get_thread_binding()
            lane = thread % 32
            quad = lane % 4
            word = (block * (THREADS // 32) + thread // 32) * 8 + lane // 4
            column = word * VALUES
            share = T.ceildiv(tokens, parts)
            begin = T.cast(part, "int64") * share
            end = T.min(begin + share, tokens)
            x_grad_words = T.Tensor((tokens, words), "int32x4", data=x_grad.data)
            ring = T.alloc_shared((stages, TILE // 4, THREADS, VALUES), "bfloat16")
            ring_words = T.Tensor((stages, TILE // 4, THREADS), "int32x4", data=ring.data, scope="shared.dyn")
            grads = T.alloc_shared((stages, TILE, row), f32)
            squares = T.alloc_shared((stages, TILE), f32)
            matrix = T.alloc_local((4 * blocks * 4,), f32)  # [pair of columns, eight mixes, fragment]
            total = T.alloc_local((4 * blocks * 4,), f32)
            grad = T.alloc_local((16,), f32)
            left = T.alloc_local((16,), f32)
            right = T.alloc_local((2,), f32)
            double = T.alloc_local((2,), f32)
            loaded = T.alloc_local((2,), "int32x4")
            ints = T.Tensor((8,), "int32", data=loaded.data, scope="local")
            result = T.alloc_local((2,), "int32x4")
            halves = T.Tensor((2 * VALUES,), "bfloat16", data=result.data, scope="local")
            eight = T.alloc_local((VALUES,), f32)
            factor = T.alloc_local((VALUES,), f32)
            if mixes % 8 != 0:
                for i in T.serial(-(-stages * TILE * row // THREADS)):
                    if i * THREADS + thread < stages * TILE * row:
                        grads[
                            (i * THREADS + thread) // (TILE * row),
                            (i * THREADS + thread) // row % TILE,
                            (i * THREADS + thread) % row,
                        ] = 0.0
                T.sync_threads()
            for ahead in T.unroll(stages - 1):
                fetch(
                    x,
                    mul_grad,
                    sqr_grad,
                    ring,
                    grads,
                    squares,
                    ahead,
                    begin + ahead * TILE,
                    end,
                    tokens - 1,
                    column,
                    thread,
                )
                T.ptx_commit_group()
            if fold:
                for j in T.vectorized(VALUES):
                    factor[j] = weight[column + j]
            for k in T.unroll(blocks):
                for half in T.unroll(2):
                    for j in T.unroll(VALUES):
                        eight[j] = 0.0
                    if k * 8 + half * 4 + quad < mixes:
                        for j in T.vectorized(VALUES):
                            eight[j] = fn[k * 8 + half * 4 + quad, column + j]
                    for j in T.unroll(VALUES):
                        if fold:
                            eight[j] = eight[j] * factor[j]
                        matrix[(j // 2 * blocks + k) * 4 + half * 2 + j % 2] = tf32(eight[j])
            for i in T.unroll(4 * blocks * 4):
                total[i] = 0.0
            for step in T.serial(T.ceildiv(T.max(end - begin, 0), TILE)):
                start = begin + T.cast(step, "int64") * TILE
                slot = T.cast(step, "int32") % stages
                T.ptx_wait_group(stages - 2)
                T.sync_threads()
                fetch(
                    x, mul_grad, sqr_grad, ring, grads, squares, (T.cast(step, "int32") + stages - 1) % stages,
                    start + (stages - 1) * TILE, end, tokens - 1, column, thread,
                )  # fmt: skip
                T.ptx_commit_group()
                for eighth in T.unroll(TILE // 8):
                    for i in T.unroll(2):
                        loaded[i] = ring_words[slot, eighth * 2 + i, thread]
                        double[i] = 2.0 * squares[slot, eighth * 8 + quad * 2 + i]
                    # left: fragment (column, token) of pair i at 4 i; grad: result (column, token) of pair i at 4 i.
                    for i in T.unroll(4):
                        for t in T.unroll(2):
                            left[4 * i + 2 * t] = T.reinterpret(ints[4 * t + i] << 16, f32)
                            left[4 * i + 2 * t + 1] = T.reinterpret(ints[4 * t + i] & T.int32(-65536), f32)
                            grad[4 * i + t] = left[4 * i + 2 * t] * double[t]
                            grad[4 * i + 2 + t] = left[4 * i + 2 * t + 1] * double[t]
                    for k in T.unroll(blocks):
                        for v in T.unroll(2):
                            right[v] = tf32(grads[slot, eighth * 8 + lane // 4, k * 8 + v * 4 + quad])
                        for i in T.unroll(4):
                            T.ptx_mma(
                                f32, "m16n8k8", "row", "col", "tf32", "tf32", "fp32", matrix.data, (i * blocks + k) * 4,
                                right.data, 0, grad.data, 4 * i, T.bool(False),
                            )  # fmt: skip
                    for k in T.unroll(blocks):
                        for v in T.unroll(2):
                            right[v] = tf32(grads[slot, eighth * 8 + quad * 2 + v, k * 8 + lane // 4])
                        for i in T.unroll(4):
                            T.ptx_mma(
                                f32, "m16n8k8", "row", "col", "tf32", "tf32", "fp32", left.data, 4 * i,
                                right.data, 0, total.data, (i * blocks + k) * 4, T.bool(False),
                            )  # fmt: skip
                    for t in T.unroll(2):
                        for j in T.unroll(VALUES):
                            eight[j] = grad[j // 2 * 4 + j % 2 * 2 + t]
                        pack(eight, 0, halves, t * VALUES)
                        if start + eighth * 8 + quad * 2 + t < end:
                            x_grad_words[start + eighth * 8 + quad * 2 + t, word] = result[t]
            for k in T.unroll(blocks):
                for v in T.unroll(2):
                    for i in T.unroll(4):
                        eight[2 * i] = total[(i * blocks + k) * 4 + v]
                        eight[2 * i + 1] = total[(i * blocks + k) * 4 + 2 + v]
                    if k * 8 + quad * 2 + v < mixes:
                        for j in T.vectorized(VALUES):
                            fn_parts[part, k * 8 + quad * 2 + v, column + j] = eight[j]

    return norm_fn_backward


def sums(columns: int, mixes: int):
    """The matrix's gradient: the parts in ascending order."""
    parts = T.dynamic("parts", "int64")

    @T.prim_func
    def norm_fn_backward_sums(
        fn_parts: T.Tensor((parts, mixes, columns), "float32"),
        fn_grad: T.Tensor((mixes, columns), "float32"),
    ):
        with T.Kernel(mixes, columns // SUM_COLUMNS, threads=THREADS) as (m, block):
            column = block * SUM_COLUMNS + 2 * T.get_thread_binding()
            total = T.alloc_local((2,), "float32")
            for v in T.vectorized(2):
                total[v] = 0.0
            for part in T.serial(parts):
                for v in T.vectorized(2):
                    total[v] = total[v] + fn_parts[part, m, column + v]
            for v in T.vectorized(2):
                fn_grad[m, column + v] = total[v]

    return norm_fn_backward_sums
