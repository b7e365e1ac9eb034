"""One thread for each matrix; backward sixteen lanes, through iterates that are kept in shared memory."""

import tilelang.language as T

from tk_serving.mhc.kernels.mixes import MULT, column_sum, row_softmax, row_sum, sinkhorn

ENTRIES = MULT * MULT
THREADS = 32
BACKWARD_THREADS = 64
MAX_REPEAT = 200
"""Backward: four numbers of a thread and iteration have to fit the shared memory."""


def build():
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def sinkhorn_normalize(
        x: T.Tensor((tokens * ENTRIES,), "float32"),
        out: T.Tensor((tokens * ENTRIES,), "float32"),
        repeat: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens, THREADS), threads=THREADS) as block:
            token = T.cast(block, "int64") * THREADS + T.get_thread_binding()
            p = T.alloc_local((ENTRIES,), "float32")
            if token < tokens:
                for i in T.unroll(MULT):
                    for j in T.vectorized(MULT):
                        p[MULT * i + j] = x[token * ENTRIES + MULT * i + j]
                sinkhorn(p, repeat, eps)
                for i in T.unroll(MULT):
                    for j in T.vectorized(MULT):
                        out[token * ENTRIES + MULT * i + j] = p[MULT * i + j]

    return sinkhorn_normalize


def backward(repeat: int):
    steps = 2 * repeat - 1
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def sinkhorn_backward(
        grad: T.Tensor((tokens * ENTRIES,), "float32"),
        x: T.Tensor((tokens * ENTRIES,), "float32"),
        out: T.Tensor((tokens * ENTRIES,), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens * ENTRIES, BACKWARD_THREADS), threads=BACKWARD_THREADS) as block:
            thread = T.get_thread_binding()
            entry = T.cast(block, "int64") * BACKWARD_THREADS + thread
            iterates = T.alloc_shared((steps, BACKWARD_THREADS), "float32")
            divisors = T.alloc_shared((steps, BACKWARD_THREADS), "float32")
            p = T.alloc_local((1,), "float32")
            g = T.alloc_local((1,), "float32")
            start = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            product = T.alloc_local((1,), "float32")
            p[0] = 0.0
            g[0] = 0.0
            if entry < tokens * ENTRIES:
                p[0] = x[entry]
                g[0] = grad[entry]
            row_softmax(p)
            start[0] = p[0]
            p[0] = p[0] + eps
            for k in T.serial(steps):
                if k % 2 == 0:
                    column_sum(p, total)
                else:
                    row_sum(p, total)
                divisors[k, thread] = total[0] + eps
                p[0] = p[0] / divisors[k, thread]
                iterates[k, thread] = p[0]
            for k in T.serial(steps):
                product[0] = g[0] * iterates[steps - 1 - k, thread]
                if k % 2 == 0:  # the first and the last step both are over columns
                    column_sum(product, total)
                else:
                    row_sum(product, total)
                g[0] = (g[0] - total[0]) / divisors[steps - 1 - k, thread]
            product[0] = g[0] * start[0]
            row_sum(product, total)
            if entry < tokens * ENTRIES:
                out[entry] = start[0] * (g[0] - total[0])

    return sinkhorn_backward
