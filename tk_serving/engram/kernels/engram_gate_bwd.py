"""A block takes one stream of every n-th token and keeps the sum of its weight gradients in registers.

The gradient of the value sums over the streams: each block makes an equal share of its columns, from the rows of
grad_out that the blocks of the other streams read at about the same time (the L2 cache has them).
"""

import tilelang.language as T

from tk_serving.engram.kernels.rows import COLUMNS, Row, block_sum, mover


def build(hidden: int, streams: int, wide: bool):
    row = Row(hidden, wide)
    bf16, f32 = "bfloat16", "float32"
    load, store = mover(row, bf16), mover(row, bf16, store=True)
    size, w_size = row.size(bf16), row.size(f32)
    per_word, planes = COLUMNS // size, COLUMNS // w_size
    share = -(-row.words // streams)
    tokens, partials = T.dynamic("tokens", "int64"), T.dynamic("partials", "int64")
    k_token, k_stream, v_token = (T.dynamic(name, "int64") for name in ("k_token", "k_stream", "v_token"))
    gk_token, gk_stream, gv_token = (T.dynamic(name, "int64") for name in ("gk_token", "gk_stream", "gv_token"))
    dense = (tokens, streams, hidden)

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
            thread = T.get_thread_binding()
            grad_units = row.units(grad_out, tokens * streams * hidden, bf16)
            x_units = row.units(hidden_states, tokens * streams * hidden, bf16)
            k_units = row.units(k, tokens * k_token + streams * k_stream + hidden, bf16)
            v_units = row.units(v, tokens * v_token + hidden, bf16)
            weight_units = row.units(weight, streams * hidden, f32)
            grad_x_units = row.units(grad_x, tokens * streams * hidden, bf16)
            grad_k_units = row.units(grad_k, tokens * gk_token + streams * gk_stream + hidden, bf16)
            grad_v_units = row.units(grad_v, tokens * gv_token + hidden, bf16)
            grad_w_units = row.units(grad_w, partials * streams * hidden, f32)
            go_own = T.alloc_local((row.owned,), bf16)
            x_own = T.alloc_local((row.owned,), bf16)
            k_own = T.alloc_local((row.owned,), bf16)
            v_own = T.alloc_local((row.owned,), bf16)
            w = T.alloc_local((COLUMNS,), f32)
            gw_own = T.alloc_local((row.owned,), f32)
            go_own_units = row.units(go_own, row.owned, bf16, "local")
            x_own_units = row.units(x_own, row.owned, bf16, "local")
            k_own_units = row.units(k_own, row.owned, bf16, "local")
            v_own_units = row.units(v_own, row.owned, bf16, "local")
            w_units = row.units(w, COLUMNS, f32, "local")
            gw_own_units = row.units(gw_own, row.owned, f32, "local")
            partial = T.alloc_shared((2, row.threads // 32), f32)
            sums = T.alloc_local((1,), f32)  # grad_out v
            delta = T.alloc_local((1,), f32)

            for i in T.unroll(row.owned):
                gw_own[i] = 0.0
            for step in T.serial(T.ceildiv(tokens - group, partials)):
                token = step * partials + group
                image = masked != 0 and mask[token] != 0
                base = (token * streams + stream) * hidden // size
                load(go_own_units, grad_units, base, thread)
                load(v_own_units, v_units, token * v_token // size, thread)
                load(x_own_units, x_units, base, thread)
                load(k_own_units, k_units, (token * k_token + stream * k_stream) // size, thread)
                value_gradient(grad_units, grad_v_units, gate, token, stream, thread, image)

                sums[0] = 0.0
                for i in T.unroll(row.steps):
                    if i * row.threads + thread < row.words:
                        for j in T.unroll(COLUMNS):
                            at = i * COLUMNS + j
                            sums[0] = T.ieee_fmaf(T.cast(go_own[at], f32), T.cast(v_own[at], f32), sums[0])
                block_sum(sums, 1, partial, step % 2, row.threads, thread)
                d = dot[token, stream]
                g = gate[token, stream]
                inverse_x = rstd_x[token, stream]
                inverse_k = rstd_k[token, stream]
                similarity = T.abs(d) * T.float32(hidden**-0.5) * inverse_x * inverse_k
                slope = T.sqrt(T.float32(hidden**-0.5) * inverse_x * inverse_k / T.abs(d))
                delta[0] = T.if_then_else(similarity < clamp, 0.0, sums[0] * g * (1.0 - g) * 0.5 * slope)
                pull_x = d * inverse_x * inverse_x / T.float32(hidden)
                pull_k = d * inverse_k * inverse_k / T.float32(hidden)
                if image:
                    for i in T.unroll(row.owned):
                        x_own[i] = go_own[i]
                        k_own[i] = T.cast(0.0, bf16)
                else:
                    for i in T.unroll(row.steps):
                        word = i * row.threads + thread
                        if word < row.words:
                            for j in T.unroll(planes):
                                w_units[j] = weight_units[(stream * row.words + word) * planes + j]
                            for j in T.unroll(COLUMNS):
                                at = i * COLUMNS + j
                                x = T.cast(x_own[at], f32)
                                key = T.cast(k_own[at], f32)
                                pushed = T.cast(go_own[at], f32) + delta[0] * (key * w[j] - x * pull_x)
                                gw_own[at] = gw_own[at] + delta[0] * (x * key)
                                x_own[at] = T.cast(pushed, bf16)
                                k_own[at] = T.cast(delta[0] * (x * w[j] - key * pull_k), bf16)
                store(x_own_units, grad_x_units, base, thread)
                store(k_own_units, grad_k_units, (token * gk_token + stream * gk_stream) // size, thread)

            for i in T.unroll(row.steps):
                word = i * row.threads + thread
                if word < row.words:
                    for j in T.unroll(planes):
                        grad_w_units[((group * streams + stream) * row.words + word) * planes + j] = gw_own_units[
                            i * planes + j
                        ]

    return engram_gate_bwd
