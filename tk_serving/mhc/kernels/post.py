"""One thread for each word of the hidden state: five words in, the four streams out."""

import tilelang.language as T

from tk_serving.mhc.kernels.reduction import block_sums
from tk_serving.mhc.kernels.words import VALUES, pack, spread, unpack

MULT = 4


def build(hidden: int):
    words = hidden // VALUES
    threads, blocks = spread(hidden)
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def post(
        x: T.Tensor((tokens, hidden), "bfloat16"),
        residual: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        post_mix: T.Tensor((tokens, MULT), "float32"),
        comb_mix: T.Tensor((tokens, MULT * MULT), "float32"),
        out: T.Tensor((tokens, MULT, hidden), "bfloat16"),
    ):
        with T.Kernel(tokens * blocks, threads=threads) as block:
            token = T.cast(block, "int64") // blocks
            column = block % blocks * threads + T.get_thread_binding()
            x_words = T.Tensor((tokens, words), "int32x4", data=x.data)
            residual_words = T.Tensor((tokens, MULT, words), "int32x4", data=residual.data)
            out_words = T.Tensor((tokens, MULT, words), "int32x4", data=out.data)
            loaded = T.alloc_local((1 + MULT,), "int32x4")
            ints = T.Tensor((4 + MULT * 4,), "int32", data=loaded.data, scope="local")
            value = T.alloc_local(((1 + MULT) * VALUES,), "float32")
            total = T.alloc_local((VALUES,), "float32")
            result = T.alloc_local((1,), "int32x4")
            halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
            to_stream = T.alloc_local((MULT,), "float32")
            mix = T.alloc_local((MULT * MULT,), "float32")
            if column < words:
                loaded[0] = x_words[token, column]
                for i in T.unroll(MULT):
                    loaded[1 + i] = residual_words[token, i, column]
                for o in T.vectorized(MULT):
                    to_stream[o] = post_mix[token, o]
                for i in T.vectorized(MULT * MULT):
                    mix[i] = comb_mix[token, i]
                for i in T.unroll(1 + MULT):
                    unpack(ints, 4 * i, value, VALUES * i)
                for o in T.unroll(MULT):
                    for j in T.unroll(VALUES):
                        total[j] = to_stream[o] * value[j]
                        for i in T.unroll(MULT):
                            total[j] = T.ieee_fmaf(mix[MULT * i + o], value[VALUES * (1 + i) + j], total[j])
                    pack(total, 0, halves, 0)
                    out_words[token, o, column] = result[0]

    return post


def backward(hidden: int):
    """One block for each token; its threads pass over the row together, so that the sums over H stay on the chip.

    At hidden sizes 4096, 5120 and 7168 they take four steps, at most 512 threads on a multiprocessor: 256 threads and
    two steps took a quarter longer at 4096 on an H200, 128 threads and seven steps a tenth longer at 7168.
    """
    words = hidden // VALUES
    threads, steps = spread(hidden, 224)
    warps = threads // 32
    sums = MULT + MULT * MULT
    tokens = T.dynamic("tokens", "int64")

    @T.prim_func
    def post_backward(
        x: T.Tensor((tokens, hidden), "bfloat16"),
        residual: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        post_mix: T.Tensor((tokens, MULT), "float32"),
        comb_mix: T.Tensor((tokens, MULT * MULT), "float32"),
        grad: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        x_grad: T.Tensor((tokens, hidden), "bfloat16"),
        residual_grad: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        post_grad: T.Tensor((tokens, MULT), "float32"),
        comb_grad: T.Tensor((tokens, MULT * MULT), "float32"),
    ):
        with T.Kernel(tokens, threads=threads) as block:
            T.annotate_min_blocks_per_sm(512 // threads)
            token = T.cast(block, "int64")
            thread = T.get_thread_binding()
            x_words = T.Tensor((tokens, words), "int32x4", data=x.data)
            residual_words = T.Tensor((tokens, MULT, words), "int32x4", data=residual.data)
            grad_words = T.Tensor((tokens, MULT, words), "int32x4", data=grad.data)
            x_grad_words = T.Tensor((tokens, words), "int32x4", data=x_grad.data)
            residual_grad_words = T.Tensor((tokens, MULT, words), "int32x4", data=residual_grad.data)
            shared = T.alloc_shared((warps, sums), "float32")
            loaded = T.alloc_local((MULT,), "int32x4")
            ints = T.Tensor((MULT * 4,), "int32", data=loaded.data, scope="local")
            word = T.alloc_local((1,), "int32x4")
            word_ints = T.Tensor((4,), "int32", data=word.data, scope="local")
            g = T.alloc_local((MULT * VALUES,), "float32")
            value = T.alloc_local((VALUES,), "float32")
            result = T.alloc_local((1,), "int32x4")
            halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
            to_stream = T.alloc_local((MULT,), "float32")
            mix = T.alloc_local((MULT * MULT,), "float32")
            total = T.alloc_local((sums,), "float32")
            for o in T.vectorized(MULT):
                to_stream[o] = post_mix[token, o]
            for i in T.vectorized(MULT * MULT):
                mix[i] = comb_mix[token, i]
            for i in T.unroll(sums):
                total[i] = 0.0
            for step in T.serial(steps):
                column = step * threads + thread
                if column < words:
                    for o in T.unroll(MULT):
                        loaded[o] = grad_words[token, o, column]
                    word[0] = x_words[token, column]
                    for o in T.unroll(MULT):
                        unpack(ints, 4 * o, g, VALUES * o)
                    unpack(word_ints, 0, value, 0)
                    for o in T.unroll(MULT):
                        for j in T.unroll(VALUES):
                            total[o] = T.ieee_fmaf(g[VALUES * o + j], value[j], total[o])
                    for j in T.unroll(VALUES):
                        value[j] = 0.0
                        for o in T.unroll(MULT):
                            value[j] = T.ieee_fmaf(to_stream[o], g[VALUES * o + j], value[j])
                    pack(value, 0, halves, 0)
                    x_grad_words[token, column] = result[0]
                    for i in T.unroll(MULT):
                        word[0] = residual_words[token, i, column]
                        unpack(word_ints, 0, value, 0)
                        for o in T.unroll(MULT):
                            for j in T.unroll(VALUES):
                                at = MULT + MULT * i + o
                                total[at] = T.ieee_fmaf(value[j], g[VALUES * o + j], total[at])
                        for j in T.unroll(VALUES):
                            value[j] = 0.0
                            for o in T.unroll(MULT):
                                value[j] = T.ieee_fmaf(mix[MULT * i + o], g[VALUES * o + j], value[j])
                        pack(value, 0, halves, 0)
                        residual_grad_words[token, i, column] = result[0]
            block_sums(total, sums, shared, thread, warps)
            if thread < MULT:
                post_grad[token, thread] = shared[0, thread]
            elif thread < sums:
                comb_grad[token, thread - MULT] = shared[0, thread]

    return post_backward
