"""A block takes one stream of every n-th token; its threads keep their columns of x, k and v in registers.

So hidden states and keys are read once. The block's weight waits in shared memory, and the value, which the streams
share, comes from the L2 cache for all streams but one: blocks of a group work on the same token at about the same time.
"""

import tilelang.language as T

from tk_serving.engram.kernels.rows import COLUMNS, Row, block_sum, mover


def build(hidden: int, wide: bool, inplace: bool, blocks_per_sm: int):
    row = Row(hidden, wide)
    bf16, f32 = "bfloat16", "float32"
    load, store = mover(row, bf16), mover(row, bf16, store=True)
    size = row.size(bf16)
    tokens, streams = T.dynamic("tokens", "int64"), T.dynamic("streams", "int64")
    k_token, k_stream, v_token = (T.dynamic(name, "int64") for name in ("k_token", "k_stream", "v_token"))
    warps, planes = row.threads // 32, COLUMNS // row.size(f32)

    @T.prim_func
    def engram_gate_fwd(
        hidden_states: T.Tensor((tokens, streams, hidden), bf16),
        k: T.StridedTensor((tokens, streams, hidden), (k_token, k_stream, 1), bf16),
        v: T.StridedTensor((tokens, hidden), (v_token, 1), bf16),
        weight: T.Tensor((streams, hidden), f32),
        mask: T.Tensor((tokens,), "uint8"),
        output: T.Tensor((tokens, streams, hidden), bf16),
        dot: T.Tensor((tokens, streams), f32),
        gate: T.Tensor((tokens, streams), f32),
        rstd_x: T.Tensor((tokens, streams), f32),
        rstd_k: T.Tensor((tokens, streams), f32),
        eps: T.float32,
        clamp: T.float32,
        masked: T.int32,
        save: T.int32,
        groups: T.int32,
    ):
        with T.Kernel(streams, groups, threads=row.threads) as (stream, group):
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            thread = T.get_thread_binding()
            source = output if inplace else hidden_states
            x_units = row.units(source, tokens * streams * hidden, bf16)
            k_units = row.units(k, tokens * k_token + streams * k_stream + hidden, bf16)
            v_units = row.units(v, tokens * v_token + hidden, bf16)
            weight_units = row.units(weight, streams * hidden, f32)
            output_units = row.units(output, tokens * streams * hidden, bf16)
            x_own = T.alloc_local((row.owned,), bf16)
            k_own = T.alloc_local((row.owned,), bf16)
            v_own = T.alloc_local((row.owned,), bf16)
            w = T.alloc_local((COLUMNS,), f32)
            w_units = row.units(w, COLUMNS, f32, "local")
            w_shared = T.alloc_shared((hidden,), f32)
            w_shared_units = row.units(w_shared, hidden, f32, "shared.dyn")
            x_own_units = row.units(x_own, row.owned, bf16, "local")
            k_own_units = row.units(k_own, row.owned, bf16, "local")
            v_own_units = row.units(v_own, row.owned, bf16, "local")
            partial = T.alloc_shared((2, warps * 3), f32)
            sums = T.alloc_local((3,), f32)  # x w k, x^2, k^2
            score = T.alloc_local((1,), f32)

            # The first token is under way before anything waits for the weight; the next one is loaded as soon as its
            # registers are free.
            x_base = stream * hidden // size
            x_step = streams * hidden // size
            k_base = stream * k_stream // size
            load(x_own_units, x_units, group * x_step + x_base, thread)
            load(k_own_units, k_units, group * k_token // size + k_base, thread)
            load(v_own_units, v_units, group * v_token // size, thread)
            # Each thread stores what it will read. Unit j of a word lies in plane j: neighbours read neighbours.
            for i in T.unroll(row.steps):
                if i * row.threads + thread < row.words:
                    for j in T.unroll(planes):
                        word = i * row.threads + thread
                        w_shared_units[j * row.words + word] = weight_units[(stream * row.words + word) * planes + j]
            for step in T.serial(T.ceildiv(tokens - group, groups)):
                token = step * groups + group
                image = masked != 0 and mask[token] != 0
                following = token + groups
                for n in T.unroll(3):
                    sums[n] = 0.0
                for i in T.unroll(row.steps):
                    if i * row.threads + thread < row.words:
                        for j in T.unroll(planes):
                            w_units[j] = w_shared_units[j * row.words + i * row.threads + thread]
                        for j in T.unroll(COLUMNS):
                            x = T.cast(x_own[i * COLUMNS + j], f32)
                            key = T.cast(k_own[i * COLUMNS + j], f32)
                            sums[0] = T.ieee_fmaf(x * w[j], key, sums[0])
                            sums[1] = T.ieee_fmaf(x, x, sums[1])
                            sums[2] = T.ieee_fmaf(key, key, sums[2])
                if following < tokens:
                    load(k_own_units, k_units, following * k_token // size + k_base, thread)
                block_sum(sums, 3, partial, step % 2, row.threads, thread)
                inverse_x = 1.0 / T.sqrt(sums[1] / T.float32(hidden) + eps)
                inverse_k = 1.0 / T.sqrt(sums[2] / T.float32(hidden) + eps)
                z = sums[0] * inverse_x * inverse_k * T.float32(hidden**-0.5)
                # The comparison is false for NaN, which so passes through.
                root = T.sqrt(T.if_then_else(T.abs(z) < clamp, clamp, T.abs(z)))
                sign = T.reinterpret(z, "int32") & T.int32(-(2**31))
                score[0] = 1.0 / (1.0 + T.exp(-T.reinterpret(T.reinterpret(root, "int32") | sign, f32)))
                if not image:
                    for i in T.unroll(row.owned):
                        mixed = T.cast(x_own[i], f32) + score[0] * T.cast(v_own[i], f32)
                        x_own[i] = T.cast(mixed, bf16)
                if not (inplace and image):
                    store(x_own_units, output_units, token * x_step + x_base, thread)
                if following < tokens:
                    load(x_own_units, x_units, following * x_step + x_base, thread)
                    load(v_own_units, v_units, following * v_token // size, thread)
                if save != 0 and thread == 0:
                    dot[token, stream] = T.if_then_else(image, 0.0, sums[0])
                    gate[token, stream] = T.if_then_else(image, 0.0, score[0])
                    rstd_x[token, stream] = T.if_then_else(image, 0.0, inverse_x)
                    rstd_k[token, stream] = T.if_then_else(image, 0.0, inverse_k)

    return engram_gate_fwd
