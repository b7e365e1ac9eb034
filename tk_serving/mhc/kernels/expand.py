"""One thread for each word of a row of the hidden state."""

import tilelang.language as T

from tk_serving.mhc.kernels.words import VALUES, pack, spread, unpack


def build(hidden: int, mult: int):
    words = hidden // VALUES
    threads, blocks = spread(hidden)
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def expand(
        x: T.Tensor((tokens, hidden), "bfloat16"),
        out: T.Tensor((tokens, mult, hidden), "bfloat16"),
    ):
        with T.Kernel(tokens * blocks, threads=threads) as block:
            token = T.cast(block, "int64") // blocks
            column = block % blocks * threads + T.get_thread_binding()
            x_words = T.Tensor((tokens, words), "int32x4", data=x.data)
            out_words = T.Tensor((tokens, mult, words), "int32x4", data=out.data)
            word = T.alloc_local((1,), "int32x4")
            if column < words:
                word[0] = x_words[token, column]
                for i in T.unroll(mult):
                    out_words[token, i, column] = word[0]

    return expand


def backward(hidden: int, mult: int):
    words = hidden // VALUES
    threads, blocks = spread(hidden)
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def expand_backward(
        grad: T.Tensor((tokens, mult, hidden), "bfloat16"),
        out: T.Tensor((tokens, hidden), "bfloat16"),
    ):
        with T.Kernel(tokens * blocks, threads=threads) as block:
            token = T.cast(block, "int64") // blocks
            column = block % blocks * threads + T.get_thread_binding()
            grad_words = T.Tensor((tokens, mult, words), "int32x4", data=grad.data)
            out_words = T.Tensor((tokens, words), "int32x4", data=out.data)
            streams = T.alloc_local((mult,), "int32x4")
            ints = T.Tensor((mult * 4,), "int32", data=streams.data, scope="local")
            total = T.alloc_local((VALUES,), "float32")
            value = T.alloc_local((VALUES,), "float32")
            result = T.alloc_local((1,), "int32x4")
            halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
            if column < words:
                for i in T.unroll(mult):
                    streams[i] = grad_words[token, i, column]
                unpack(ints, 0, total, 0)
                for i in T.unroll(1, mult):
                    unpack(ints, 4 * i, value, 0)
                    for j in T.unroll(VALUES):
                        total[j] = total[j] + value[j]
                pack(total, 0, halves, 0)
                out_words[token, column] = result[0]

    return expand_backward
