"""Several layers at once: a thread keeps its word of the four streams in registers from layer to layer."""

import tilelang.language as T

from tk_serving.mhc.kernels.words import VALUES, pack, spread, unpack
from tk_serving.quant.kernels.formats import view

MULT = 4
MAX_LAYERS = 12
"""Of one launch. Each further launch reads the streams again; the tensors of twelve layers fit a kernel's arguments."""


def build(hidden: int, layers: int, last_update: bool):
    """The first ``layers`` of twelve; ``last_update``: the last one also updates the streams.

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

    @T.macro
    def layer(index, state, ints, token, column, pre, inputs, outputs, post, comb, residual):
        """Layer ``index`` of the launch, if there is one."""
        if layers > index:
            input_of(ints, pre, view(inputs, (tokens, words), "int32x4")[0], token, column)
        if layers > index + 1 or (layers == index + 1 and last_update):
            update(
                state, ints, view(outputs, (tokens, words), "int32x4")[0], post, comb,
                view(residual, (tokens, MULT, words), "int32x4")[0], token, column,
            )  # fmt: skip

    @T.prim_func
    def recompute(
        initial: streams(),
        pre_0: mix(), input_0: row(), output_0: row(), post_0: mix(), comb_0: comb(), residual_0: streams(),
        pre_1: mix(), input_1: row(), output_1: row(), post_1: mix(), comb_1: comb(), residual_1: streams(),
        pre_2: mix(), input_2: row(), output_2: row(), post_2: mix(), comb_2: comb(), residual_2: streams(),
        pre_3: mix(), input_3: row(), output_3: row(), post_3: mix(), comb_3: comb(), residual_3: streams(),
        pre_4: mix(), input_4: row(), output_4: row(), post_4: mix(), comb_4: comb(), residual_4: streams(),
        pre_5: mix(), input_5: row(), output_5: row(), post_5: mix(), comb_5: comb(), residual_5: streams(),
        pre_6: mix(), input_6: row(), output_6: row(), post_6: mix(), comb_6: comb(), residual_6: streams(),
        pre_7: mix(), input_7: row(), output_7: row(), post_7: mix(), comb_7: comb(), residual_7: streams(),
        pre_8: mix(), input_8: row(), output_8: row(), post_8: mix(), comb_8: comb(), residual_8: streams(),
        pre_9: mix(), input_9: row(), output_9: row(), post_9: mix(), comb_9: comb(), residual_9: streams(),
        pre_10: mix(), input_10: row(), output_10: row(), post_10: mix(), comb_10: comb(), residual_10: streams(),
        pre_11: mix(), input_11: row(), output_11: row(), post_11: mix(), comb_11: comb(), residual_11: streams(),
    ):  # fmt: skip
        with T.Kernel(tokens * blocks, threads=threads) as block:
            token = T.cast(block, "int64") // blocks
            column = block % blocks * threads + T.get_thread_binding()
            initial_words = T.Tensor((tokens, MULT, words), "int32x4", data=initial.data)
            state = T.alloc_local((MULT,), "int32x4")
            ints = T.Tensor((MULT * 4,), "int32", data=state.data, scope="local")
            if column < words:
                for i in T.unroll(MULT):
                    state[i] = initial_words[token, i, column]
                layer(0, state, ints, token, column, pre_0, input_0, output_0, post_0, comb_0, residual_0)
                layer(1, state, ints, token, column, pre_1, input_1, output_1, post_1, comb_1, residual_1)
                layer(2, state, ints, token, column, pre_2, input_2, output_2, post_2, comb_2, residual_2)
                layer(3, state, ints, token, column, pre_3, input_3, output_3, post_3, comb_3, residual_3)
                layer(4, state, ints, token, column, pre_4, input_4, output_4, post_4, comb_4, residual_4)
                layer(5, state, ints, token, column, pre_5, input_5, output_5, post_5, comb_5, residual_5)
                layer(6, state, ints, token, column, pre_6, input_6, output_6, post_6, comb_6, residual_6)
                layer(7, state, ints, token, column, pre_7, input_7, output_7, post_7, comb_7, residual_7)
                layer(8, state, ints, token, column, pre_8, input_8, output_8, post_8, comb_8, residual_8)
                layer(9, state, ints, token, column, pre_9, input_9, output_9, post_9, comb_9, residual_9)
                layer(10, state, ints, token, column, pre_10, input_10, output_10, post_10, comb_10, residual_10)
                layer(11, state, ints, token, column, pre_11, input_11, output_11, post_11, comb_11, residual_11)

    return recompute
