"""One thread for each word of an output row: the four streams are read once, sixteen bytes at a time."""

import tilelang.language as T

from tk_serving.mhc.kernels.reduction import block_sums
from tk_serving.mhc.kernels.words import VALUES, pack, spread, unpack

MULT = 4


def build(hidden: int):
    words = hidden // VALUES
    threads, blocks = spread(hidden)
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def apply_mix(
        x: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        mix: T.Tensor((tokens, MULT), "float32"),
        out: T.Tensor((tokens, hidden), "bfloat16"),
    ):
        with T.Kernel(tokens * blocks, threads=threads) as block:
            token = T.cast(block, "int64") // blocks
            column = block % blocks * threads + T.get_thread_binding()
            x_words = T.Tensor((tokens, MULT, words), "int32x4", data=x.data)
            out_words = T.Tensor((tokens, words), "int32x4", data=out.data)
            streams = T.alloc_local((MULT,), "int32x4")
            ints = T.Tensor((MULT * 4,), "int32", data=streams.data, scope="local")
            value = T.alloc_local((VALUES,), "float32")
            acc = T.alloc_local((VALUES,), "float32")
            result = T.alloc_local((1,), "int32x4")
            halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
            weight = T.alloc_local((MULT,), "float32")
            if column < words:
                for i in T.unroll(MULT):
                    streams[i] = x_words[token, i, column]
                for i in T.vectorized(MULT):
                    weight[i] = mix[token, i]
                for j in T.unroll(VALUES):
                    acc[j] = 0.0
                for i in T.unroll(MULT):
                    unpack(ints, 4 * i, value, 0)
                    for j in T.unroll(VALUES):
                        acc[j] = T.ieee_fmaf(weight[i], value[j], acc[j])
                pack(acc, 0, halves, 0)
                out_words[token, column] = result[0]

    return apply_mix


def backward(hidden: int):
    """One block for each token; its threads pass over the row together, so that the sums over H stay on the chip."""
    words = hidden // VALUES
    threads, steps = spread(hidden)
    warps = threads // 32
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def apply_mix_backward(
        grad: T.Tensor((tokens, hidden), "bfloat16"),
        x: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        mix: T.Tensor((tokens, MULT), "float32"),
        x_grad: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        mix_grad: T.Tensor((tokens, MULT), "float32"),
    ):
        with T.Kernel(tokens, threads=threads) as block:
            token = T.cast(block, "int64")
            thread = T.get_thread_binding()
            grad_words = T.Tensor((tokens, words), "int32x4", data=grad.data)
            x_words = T.Tensor((tokens, MULT, words), "int32x4", data=x.data)
            x_grad_words = T.Tensor((tokens, MULT, words), "int32x4", data=x_grad.data)
            shared = T.alloc_shared((warps, MULT), "float32")
            loaded = T.alloc_local((1 + MULT,), "int32x4")
            ints = T.Tensor((4 + MULT * 4,), "int32", data=loaded.data, scope="local")
            g = T.alloc_local((VALUES,), "float32")
            value = T.alloc_local((VALUES,), "float32")
            result = T.alloc_local((1,), "int32x4")
            halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
            weight = T.alloc_local((MULT,), "float32")
            total = T.alloc_local((MULT,), "float32")
            for i in T.vectorized(MULT):
                weight[i] = mix[token, i]
            for i in T.unroll(MULT):
                total[i] = 0.0
            for step in T.serial(steps):
                column = step * threads + thread
                if column < words:
                    loaded[0] = grad_words[token, column]
                    for i in T.unroll(MULT):
                        loaded[1 + i] = x_words[token, i, column]
                    unpack(ints, 0, g, 0)
                    for i in T.unroll(MULT):
                        unpack(ints, 4 + 4 * i, value, 0)
                        for j in T.unroll(VALUES):
                            total[i] = T.ieee_fmaf(g[j], value[j], total[i])
                        for j in T.unroll(VALUES):
                            value[j] = weight[i] * g[j]
                        pack(value, 0, halves, 0)
                        x_grad_words[token, i, column] = result[0]
            block_sums(total, MULT, shared, thread, warps)
            if thread < MULT:
                mix_grad[token, thread] = shared[0, thread]

    return apply_mix_backward
