"""A block takes one stream of every n-th token and keeps the sum of its weight gradients in registers.

Meanwhile grad_out, x, k and v of its next token travel to shared memory. A thread copies what it alone will read.
The gradient of the value sums over the streams: each block makes an equal share of its columns, from the rows of
grad_out that the blocks of the other streams read at about the same time (the L2 cache has them).
"""

import tilelang.language as T

from tk_serving.engram.kernels.rows import COLUMNS, Row, block_sum, word_copier


def build(hidden: int, streams: int, wide: bool):
    # A thread makes one word of the value's gradient and owns one for each stream, where that comes to whole warps.
    share = -(-hidden // COLUMNS // streams)
    row = Row(hidden, wide, share if share % 32 == 0 and share <= 256 else 0)
    resident = max(1, min(4, (640 if row.steps <= 4 else 256) // row.threads))
    bf16, f32 = "bfloat16", "float32"
    size, w_size = row.size(bf16), row.size(f32)
    per_word, planes = COLUMNS // size, COLUMNS // w_size
    tokens, partials = T.dynamic("tokens", "int64"), T.dynamic("partials", "int64")
    k_token, k_stream, v_token = (T.dynamic(name, "int64") for name in ("k_token", "k_stream", "v_token"))
    gk_token, gk_stream, gv_token = (T.dynamic(name, "int64") for name in ("gk_token", "gk_stream", "gv_token"))
    dense = (tokens, streams, hidden)
    X, K, V, GRAD = range(4)
    fetch = word_copier(row, with_grad=True)

    @T.macro
    def value_gradient(grad_units, out_units, gate, token, stream, thread, image):
        go = T.alloc_local((streams * COLUMNS,), bf16)
        go_units = row.units(go, streams * COLUMNS, bf16, "local")
        made = T.alloc_local((COLUMNS,), bf16)
        made_units = row.units(made, COLUMNS, bf16, "local")
        total = T.alloc_local((1,), f32)
        for i in T.unroll(-(-share // row.threads)):
            at = i * row.threads + thread
            word = stream * share + at
            if at < share and word < row.words:
                for s in T.unroll(streams):
                    for j in T.unroll(per_word):
                        go_units[s * per_word + j] = grad_units[
                            ((token * streams + s) * row.words + word) * per_word + j
                        ]
                for j in T.unroll(COLUMNS):
                    total[0] = 0.0
                    for s in T.unroll(streams):
                        total[0] = total[0] + T.cast(go[s * COLUMNS + j], f32) * gate[token, s]
                    made[j] = T.cast(T.if_then_else(image, 0.0, total[0]), bf16)
                for j in T.unroll(per_word):
                    out_units[token * gv_token // size + word * per_word + j] = made_units[j]

    @T.prim_func
    def engram_gate_bwd(
        grad_out: T.Tensor(dense, bf16),
        hidden_states: T.Tensor(dense, bf16),
        k: T.StridedTensor(dense, (k_token, k_stream, 1), bf16),
        v: T.StridedTensor((tokens, hidden), (v_token, 1), bf16),
        weight: T.Tensor((streams, hidden), f32),
        dot: T.Tensor((tokens, streams), f32),
        gate: T.Tensor((tokens, streams), f32),
        rstd_x: T.Tensor((tokens, streams), f32),
        rstd_k: T.Tensor((tokens, streams), f32),
        mask: T.Tensor((tokens,), "uint8"),
        grad_x: T.Tensor(dense, bf16),
        grad_k: T.StridedTensor(dense, (gk_token, gk_stream, 1), bf16),
        grad_v: T.StridedTensor((tokens, hidden), (gv_token, 1), bf16),
        grad_w: T.Tensor((partials, streams, hidden), f32),
        clamp: T.float32,
        masked: T.int32,
    ):
        with T.Kernel(streams, partials, threads=row.threads) as (stream, group):
            T.annotate_min_blocks_per_sm(resident)
            thread = T.get_thread_binding()
            grad_units = row.units(grad_out, tokens * streams * hidden, bf16)
            weight_units = row.units(weight, streams * hidden, f32)
            grad_x_units = row.units(grad_x, tokens * streams * hidden, bf16)
            grad_k_units = row.units(grad_k, tokens * gk_token + streams * gk_stream + hidden, bf16)
            grad_v_units = row.units(grad_v, tokens * gv_token + hidden, bf16)
            grad_w_units = row.units(grad_w, partials * streams * hidden, f32)
            ring = T.alloc_shared((1, 4, row.steps, row.threads, COLUMNS), bf16)
            ring_words = T.Tensor((1, 4, row.steps, row.threads), "int32x4", data=ring.data, scope="shared.dyn")
            own = T.alloc_local((3,), "int32x4")
            own_values = T.Tensor((3 * COLUMNS,), bf16, data=own.data, scope="local")
            made = T.alloc_local((2,), "int32x4")
            made_values = T.Tensor((2 * COLUMNS,), bf16, data=made.data, scope="local")
            made_units = row.units(made, 2 * COLUMNS, bf16, "local")
            w = T.alloc_local((COLUMNS,), f32)
            gw_own = T.alloc_local((row.owned,), f32)
            w_units = row.units(w, COLUMNS, f32, "local")
            gw_own_units = row.units(gw_own, row.owned, f32, "local")
            partial = T.alloc_shared((2, row.threads // 32), f32)
            sums = T.alloc_local((1,), f32)  # grad_out v
            delta = T.alloc_local((1,), f32)
            saved = T.alloc_local((4,), f32)

            for i in T.unroll(row.owned):
                gw_own[i] = 0.0
            if group < tokens:
                for i in T.unroll(row.steps):
                    fetch(hidden_states, k, v, grad_out, ring, 0, group, stream, i, thread)
            T.ptx_commit_group()
            for step in T.serial(T.ceildiv(tokens - group, partials)):
                token = step * partials + group
                image = masked != 0 and mask[token] != 0
                base = (token * streams + stream) * hidden // size
                saved[0] = dot[token, stream]
                saved[1] = gate[token, stream]
                saved[2] = rstd_x[token, stream]
                saved[3] = rstd_k[token, stream]
                value_gradient(grad_units, grad_v_units, gate, token, stream, thread, image)
                T.ptx_wait_group(0)
                sums[0] = 0.0
                for i in T.unroll(row.steps):
                    if i * row.threads + thread < row.words:
                        own[0] = ring_words[0, GRAD, i, thread]
                        own[1] = ring_words[0, V, i, thread]
                        for j in T.unroll(COLUMNS):
                            sums[0] = T.ieee_fmaf(
                                T.cast(own_values[j], f32), T.cast(own_values[COLUMNS + j], f32), sums[0]
                            )
                block_sum(sums, 1, partial, step % 2, row.threads, thread)
                similarity = T.abs(saved[0]) * T.float32(hidden**-0.5) * saved[2] * saved[3]
                slope = T.sqrt(T.float32(hidden**-0.5) * saved[2] * saved[3] / T.abs(saved[0]))
                delta[0] = T.if_then_else(similarity < clamp, 0.0, sums[0] * saved[1] * (1.0 - saved[1]) * 0.5 * slope)
                pull_x = saved[0] * saved[2] * saved[2] / T.float32(hidden)
                pull_k = saved[0] * saved[3] * saved[3] / T.float32(hidden)
                for i in T.unroll(row.steps):
                    word = i * row.threads + thread
                    if word < row.words:
                        own[0] = ring_words[0, GRAD, i, thread]
                        own[1] = ring_words[0, X, i, thread]
                        own[2] = ring_words[0, K, i, thread]
                        if token + partials < tokens:
                            fetch(hidden_states, k, v, grad_out, ring, 0, token + partials, stream, i, thread)
                        if image:
                            made[0] = own[0]
                            for j in T.unroll(COLUMNS):
                                made_values[COLUMNS + j] = T.cast(0.0, bf16)
                        else:
                            for j in T.unroll(planes):
                                w_units[j] = weight_units[(stream * row.words + word) * planes + j]
                            for j in T.unroll(COLUMNS):
                                x = T.cast(own_values[COLUMNS + j], f32)
                                key = T.cast(own_values[2 * COLUMNS + j], f32)
                                pushed = T.cast(own_values[j], f32) + delta[0] * (key * w[j] - x * pull_x)
                                gw_own[i * COLUMNS + j] = gw_own[i * COLUMNS + j] + delta[0] * (x * key)
                                made_values[j] = T.cast(pushed, bf16)
                                made_values[COLUMNS + j] = T.cast(delta[0] * (x * w[j] - key * pull_k), bf16)
                        for j in T.unroll(per_word):
                            grad_x_units[base + word * per_word + j] = made_units[j]
                            grad_k_units[(token * gk_token + stream * gk_stream) // size + word * per_word + j] = (
                                made_units[per_word + j]
                            )
                T.ptx_commit_group()

            for i in T.unroll(row.steps):
                word = i * row.threads + thread
                if word < row.words:
                    for j in T.unroll(planes):
                        grad_w_units[((group * streams + stream) * row.words + word) * planes + j] = gw_own_units[
                            i * planes + j
                        ]

    return engram_gate_bwd
