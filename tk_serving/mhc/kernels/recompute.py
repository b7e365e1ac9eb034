"""Several layers at once: a thread keeps its word of the four streams in registers from layer to layer."""

import tilelang.language as T

from tk_serving.mhc.kernels.words import VALUES, pack, spread, unpack

MULT = 4
MAX_LAYERS = 4


def build(hidden: int, layers: int, last_update: bool):
    """The first ``layers`` of four layers; ``last_update``: the last one also updates the streams.

    The tensors of a layer: pre mix, input (written), sublayer output, post and combination mix, next streams (written).
    """
    words = hidden // VALUES
    threads, blocks = spread(hidden)
    tokens = T.dynamic("tokens", "int64")

    def row():
        return T.Tensor((tokens, hidden), "bfloat16")

    def streams():
        return T.Tensor((tokens, MULT, hidden), "bfloat16")

    def mix():
        return T.Tensor((tokens, MULT), "float32")

    def comb():
        return T.Tensor((tokens, MULT * MULT), "float32")

    @T.macro
    def input_of(ints, pre, out_words, token, column):
        """The weighted sum of the streams."""
        value = T.alloc_local((VALUES,), "float32")
        total = T.alloc_local((VALUES,), "float32")
        weight = T.alloc_local((MULT,), "float32")
        result = T.alloc_local((1,), "int32x4")
        halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
        for i in T.vectorized(MULT):
            weight[i] = pre[token, i]
        for j in T.unroll(VALUES):
            total[j] = 0.0
        for i in T.unroll(MULT):
            unpack(ints, 4 * i, value, 0)
            for j in T.unroll(VALUES):
                total[j] = T.ieee_fmaf(weight[i], value[j], total[j])
        pack(total, 0, halves, 0)
        out_words[token, column] = result[0]

    @T.macro
    def update(state, ints, x_words, post, comb, out_words, token, column):
        """The streams after the sublayer, in place and written."""
        value = T.alloc_local((MULT * VALUES,), "float32")
        x = T.alloc_local((VALUES,), "float32")
        total = T.alloc_local((VALUES,), "float32")
        to_stream = T.alloc_local((MULT,), "float32")
        mixes = T.alloc_local((MULT * MULT,), "float32")
        word = T.alloc_local((1,), "int32x4")
        word_ints = T.Tensor((4,), "int32", data=word.data, scope="local")
        halves = T.Tensor((MULT * VALUES,), "bfloat16", data=state.data, scope="local")
        word[0] = x_words[token, column]
        for o in T.vectorized(MULT):
            to_stream[o] = post[token, o]
        for i in T.vectorized(MULT * MULT):
            mixes[i] = comb[token, i]
        unpack(word_ints, 0, x, 0)
        for i in T.unroll(MULT):
            unpack(ints, 4 * i, value, VALUES * i)
        for o in T.unroll(MULT):
            for j in T.unroll(VALUES):
                total[j] = to_stream[o] * x[j]
                for i in T.unroll(MULT):
                    total[j] = T.ieee_fmaf(mixes[MULT * i + o], value[VALUES * i + j], total[j])
            pack(total, 0, halves, VALUES * o)
            out_words[token, o, column] = state[o]

    @T.prim_func
    def recompute(
        initial: streams(),
        pre_0: mix(), input_0: row(), output_0: row(), post_0: mix(), comb_0: comb(), residual_0: streams(),
        pre_1: mix(), input_1: row(), output_1: row(), post_1: mix(), comb_1: comb(), residual_1: streams(),
        pre_2: mix(), input_2: row(), output_2: row(), post_2: mix(), comb_2: comb(), residual_2: streams(),
        pre_3: mix(), input_3: row(), output_3: row(), post_3: mix(), comb_3: comb(), residual_3: streams(),
    ):  # fmt: skip
        with T.Kernel(tokens * blocks, threads=threads) as block:
            token = T.cast(block, "int64") // blocks
            column = block % blocks * threads + T.get_thread_binding()
            initial_words = T.Tensor((tokens, MULT, words), "int32x4", data=initial.data)
            # Views of different tensors need different names: the generated host code checks shapes by name.
            words_i0 = T.Tensor((tokens, words), "int32x4", data=input_0.data)
            words_i1 = T.Tensor((tokens, words), "int32x4", data=input_1.data)
            words_i2 = T.Tensor((tokens, words), "int32x4", data=input_2.data)
            words_i3 = T.Tensor((tokens, words), "int32x4", data=input_3.data)
            words_o0 = T.Tensor((tokens, words), "int32x4", data=output_0.data)
            words_o1 = T.Tensor((tokens, words), "int32x4", data=output_1.data)
            words_o2 = T.Tensor((tokens, words), "int32x4", data=output_2.data)
            words_o3 = T.Tensor((tokens, words), "int32x4", data=output_3.data)
            words_r0 = T.Tensor((tokens, MULT, words), "int32x4", data=residual_0.data)
            words_r1 = T.Tensor((tokens, MULT, words), "int32x4", data=residual_1.data)
            words_r2 = T.Tensor((tokens, MULT, words), "int32x4", data=residual_2.data)
            words_r3 = T.Tensor((tokens, MULT, words), "int32x4", data=residual_3.data)
            state = T.alloc_local((MULT,), "int32x4")
            ints = T.Tensor((MULT * 4,), "int32", data=state.data, scope="local")
            if column < words:
                for i in T.unroll(MULT):
                    state[i] = initial_words[token, i, column]
                input_of(ints, pre_0, words_i0, token, column)
                if layers > 1 or last_update:
                    update(state, ints, words_o0, post_0, comb_0, words_r0, token, column)
                if layers > 1:
                    input_of(ints, pre_1, words_i1, token, column)
                if layers > 2 or (layers == 2 and last_update):
                    update(state, ints, words_o1, post_1, comb_1, words_r1, token, column)
                if layers > 2:
                    input_of(ints, pre_2, words_i2, token, column)
                if layers > 3 or (layers == 3 and last_update):
                    update(state, ints, words_o2, post_2, comb_2, words_r2, token, column)
                if layers > 3:
                    input_of(ints, pre_3, words_i3, token, column)
                if layers == 4 and last_update:
                    update(state, ints, words_o3, post_3, comb_3, words_r3, token, column)

    return recompute
