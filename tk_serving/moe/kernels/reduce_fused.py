"""Gather and add: a block makes one part of a token's row, a thread eight columns of it.

The rows of up to eight positions are loaded before the first is used, so that their latencies overlap.
"""

import tilelang.language as T

from tk_serving.moe.kernels.rows import resident_blocks, threads_for

UNIT = 8
BATCH = 8
MIN_THREADS = 896  # a thread holds eight rows of 16 bytes

# With eight rows and a shared one in flight, at the bound of registers that keeps enough warps on an SM.
LOCAL_MEMORY = {"build": "8 bytes at the register bound that keeps enough warps on an SM"}


def build(
    hidden: int,
    dtype: str,
    out_dtype: str,
    num_topk: int,
    weighted: bool,
    row_scaled: bool,
    scaled: bool,
    shared: str,
):
    units = hidden // UNIT
    threads = threads_for(units)
    parts = (units + threads - 1) // threads
    tokens, rows = T.dynamic("tokens", "int64"), T.dynamic("rows", "int64")
    extra_dtype = shared or dtype
    lanes = {name: 4 if name == "float32" else UNIT for name in (dtype, extra_dtype, out_dtype)}
    row_stride = T.dynamic("row_stride", "int64")
    shared_stride = T.dynamic("shared_stride", "int64")

    def in_vectors(rows, stride, name):
        """Shape and strides of rows in vectors; the stride as a multiple, which the compiler cannot know of it."""
        return (rows, hidden // lanes[name], lanes[name]), (stride // lanes[name] * lanes[name], lanes[name], 1)

    @T.macro
    def load(source, vectors, row, column, value, at, wide, lanes):
        """Eight columns of a row, in loads of at most 16 bytes."""
        if wide != 0:
            for i in T.unroll(UNIT // lanes):
                for j in T.vectorized(lanes):
                    value[at + i * lanes + j] = vectors[row, T.truncdiv(column, lanes) + i, j]
        else:
            for i in T.unroll(UNIT):
                value[at + i] = source[row, column + i]

    @T.macro
    def store(out, row, column, value, wide, lanes):
        if wide != 0:
            for i in T.unroll(UNIT // lanes):
                for j in T.vectorized(lanes):
                    out[row, column + i * lanes + j] = value[i * lanes + j]
        else:
            for i in T.unroll(UNIT):
                out[row, column + i] = value[i]

    @T.prim_func
    def reduce_fused(
        x: T.StridedTensor((rows, hidden), (row_stride, 1), dtype),
        x_sf: T.Tensor((rows,), "float32"),
        weights: T.Tensor((tokens, num_topk), "float32"),
        positions: T.Tensor((tokens, num_topk), "int32"),
        sf: T.Tensor((1,), "float32"),
        shared_out: T.StridedTensor((tokens, hidden), (shared_stride, 1), extra_dtype),
        out: T.Tensor((tokens, hidden), out_dtype),
        wide: T.int32,
    ):
        with T.Kernel(tokens * parts, threads=threads) as block:
            T.annotate_min_blocks_per_sm(resident_blocks(threads, MIN_THREADS))
            # Every view needs a name of its own: it becomes the name of the argument, by which the host finds sizes.
            x_shape, x_strides = in_vectors(rows, row_stride, dtype)
            x_vectors = T.Buffer(x_shape, dtype, data=x.data, strides=x_strides)
            shared_shape, shared_strides = in_vectors(tokens, shared_stride, extra_dtype)
            shared_vectors = T.Buffer(shared_shape, extra_dtype, data=shared_out.data, strides=shared_strides)
            thread = T.get_thread_binding()
            token = T.cast(T.truncdiv(block, parts), "int64")
            unit = T.truncmod(block, parts) * threads + thread
            place = T.alloc_local((BATCH,), "int64")
            scale = T.alloc_local((BATCH,), "float32")
            value = T.alloc_local((BATCH * UNIT,), dtype)
            extra = T.alloc_local((UNIT,), extra_dtype)
            acc = T.alloc_local((UNIT,), "float32")
            result = T.alloc_local((UNIT,), out_dtype)
            if unit < units:
                for i in T.unroll(UNIT):
                    acc[i] = 0
                if shared:
                    load(shared_out, shared_vectors, token, unit * UNIT, extra, 0, wide, lanes[extra_dtype])
                for b in T.serial((num_topk + BATCH - 1) // BATCH):
                    for k in T.unroll(min(BATCH, num_topk)):
                        place[k] = -1
                        if b * BATCH + k < num_topk:
                            place[k] = T.cast(positions[token, b * BATCH + k], "int64")
                        if place[k] >= 0 and place[k] < rows:
                            load(x, x_vectors, place[k], unit * UNIT, value, k * UNIT, wide, lanes[dtype])
                            scale[k] = 1
                            if weighted:
                                scale[k] = weights[token, b * BATCH + k]
                            if row_scaled:
                                scale[k] = scale[k] * x_sf[place[k]]
                    for k in T.unroll(min(BATCH, num_topk)):
                        if place[k] >= 0 and place[k] < rows:
                            for i in T.unroll(UNIT):
                                acc[i] = T.ieee_fmaf(T.cast(value[k * UNIT + i], "float32"), scale[k], acc[i])
                for i in T.unroll(UNIT):
                    if scaled:
                        acc[i] = acc[i] * sf[0]
                    if shared:
                        acc[i] = acc[i] + T.cast(extra[i], "float32")
                for i in T.vectorized(UNIT):
                    result[i] = T.cast(acc[i], out_dtype)
                store(out, token, unit * UNIT, result, wide, lanes[out_dtype])

    return reduce_fused
