"""A block takes one stream of every n-th token; meanwhile x, k and v of its next ones travel to shared memory.

So hidden states and keys are read once. The block's weight waits in shared memory as well, and the value, which the
streams share, comes from the L2 cache for all streams but one: blocks of a group work on the same token at about the
same time. A thread copies what it alone will read.
"""

import tilelang.language as T

from tk_serving.engram.kernels.rows import COLUMNS, Row, block_sum, copier


def build(hidden: int, wide: bool, inplace: bool, blocks_per_sm: int, stages: int = 2, threads: int = 0):
    row = Row(hidden, wide, threads)
    bf16, f32 = "bfloat16", "float32"
    fetch = copier(row)
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
            weight_units = row.units(weight, streams * hidden, f32)
            output_units = row.units(output, tokens * streams * hidden, bf16)
            ring = T.alloc_shared((stages, 3, row.steps, row.threads, COLUMNS), bf16)
            ring_words = T.Tensor((stages, 3, row.steps, row.threads), "int32x4", data=ring.data, scope="shared.dyn")
            own = T.alloc_local((2,), "int32x4")
            own_values = T.Tensor((2 * COLUMNS,), bf16, data=own.data, scope="local")
            result = T.alloc_local((1,), "int32x4")
            mixed = T.Tensor((COLUMNS,), bf16, data=result.data, scope="local")
            mixed_units = row.units(result, COLUMNS, bf16, "local")
            w = T.alloc_local((COLUMNS,), f32)
            w_units = row.units(w, COLUMNS, f32, "local")
            w_shared = T.alloc_shared((hidden,), f32)
            w_shared_units = row.units(w_shared, hidden, f32, "shared.dyn")
            partial = T.alloc_shared((2, warps * 3), f32)
            sums = T.alloc_local((3,), f32)  # x w k, x^2, k^2
            score = T.alloc_local((1,), f32)

            for ahead in T.unroll(stages - 1):
                if group + ahead * groups < tokens:
                    fetch(source, k, v, ring, ahead, group + ahead * groups, stream, thread)
                T.ptx_commit_group()
            # Each thread stores what it will read. Unit j of a word lies in plane j: neighbours read neighbours.
            for i in T.unroll(row.steps):
                if i * row.threads + thread < row.words:
                    for j in T.unroll(planes):
                        word = i * row.threads + thread
                        w_shared_units[j * row.words + word] = weight_units[(stream * row.words + word) * planes + j]
            for step in T.serial(T.ceildiv(tokens - group, groups)):
                token = step * groups + group
                image = masked != 0 and mask[token] != 0
                slot = T.cast(step, "int32") % stages
                for n in T.unroll(3):
                    sums[n] = 0.0
                T.ptx_wait_group(stages - 2)
                T.sync_threads()
                if token + (stages - 1) * groups < tokens:
                    fetch(
                        source, k, v, ring, (T.cast(step, "int32") + stages - 1) % stages,
                        token + (stages - 1) * groups, stream, thread,
                    )  # fmt: skip
                T.ptx_commit_group()
                for i in T.unroll(row.steps):
                    if i * row.threads + thread < row.words:
                        own[0] = ring_words[slot, 0, i, thread]
                        own[1] = ring_words[slot, 1, i, thread]
                        for j in T.unroll(planes):
                            w_units[j] = w_shared_units[j * row.words + i * row.threads + thread]
                        for j in T.unroll(COLUMNS):
                            x = T.cast(own_values[j], f32)
                            key = T.cast(own_values[COLUMNS + j], f32)
                            sums[0] = T.ieee_fmaf(x * w[j], key, sums[0])
                            sums[1] = T.ieee_fmaf(x, x, sums[1])
                            sums[2] = T.ieee_fmaf(key, key, sums[2])
                block_sum(sums, 3, partial, step % 2, row.threads, thread)
                inverse_x = 1.0 / T.sqrt(sums[1] / T.float32(hidden) + eps)
                inverse_k = 1.0 / T.sqrt(sums[2] / T.float32(hidden) + eps)
                z = sums[0] * inverse_x * inverse_k * T.float32(hidden**-0.5)
                # The comparison is false for NaN, which so passes through.
                root = T.sqrt(T.if_then_else(T.abs(z) < clamp, clamp, T.abs(z)))
                sign = T.reinterpret(z, "int32") & T.int32(-(2**31))
                score[0] = 1.0 / (1.0 + T.exp(-T.reinterpret(T.reinterpret(root, "int32") | sign, f32)))
                if not (inplace and image):
                    for i in T.unroll(row.steps):
                        word = i * row.threads + thread
                        if word < row.words:
                            own[0] = ring_words[slot, 0, i, thread]
                            own[1] = ring_words[slot, 2, i, thread]
                            result[0] = own[0]
                            if not image:
                                for j in T.vectorized(COLUMNS):
                                    mixed[j] = T.cast(
                                        T.cast(own_values[j], f32) + score[0] * T.cast(own_values[COLUMNS + j], f32),
                                        bf16,
                                    )
                            for u in T.unroll(COLUMNS // size):
                                output_units[
                                    ((token * streams + stream) * row.words + word) * (COLUMNS // size) + u
                                ] = mixed_units[u]
                if save != 0 and thread == 0:
                    dot[token, stream] = T.if_then_else(image, 0.0, sums[0])
                    gate[token, stream] = T.if_then_else(image, 0.0, score[0])
                    rstd_x[token, stream] = T.if_then_else(image, 0.0, inverse_x)
                    rstd_k[token, stream] = T.if_then_else(image, 0.0, inverse_k)

    return engram_gate_fwd
