"""Scatter of token rows: a block reads one part of a row once and writes it to all positions of the token.

Further blocks of the same launch fill the padding rows, or only their scales, with zeros. Rows are cut into parts, so
that a single token already keeps several multiprocessors busy.
"""

import tilelang.language as T

from tk_serving.moe.kernels.rows import VECTOR, padding_clearer, resident_blocks, rows_to_clear, threads_for

MIN_THREADS = 1536


def build(hidden: int, itemsize: int, num_topk: int, sf_columns: int, sourced: bool, zero_padding: bool):
    """``sourced``: note the token of every row for a launch that follows."""
    dtype = {1: "int8", 2: "int16", 4: "int32"}[itemsize]
    per_unit = VECTOR // itemsize
    units = (hidden + per_unit - 1) // per_unit
    threads = threads_for(units)
    parts = (units + threads - 1) // threads
    whole = hidden % per_unit == 0  # else no row but the first starts on 16 bytes
    clear_padding = padding_clearer(hidden, dtype, threads, sf_columns, zero_padding)
    cleared = rows_to_clear(zero_padding, sf_columns)

    tokens, rows, sf_rows = (T.dynamic(name, "int64") for name in ("tokens", "rows", "sf_rows"))
    sf_strides = T.dynamic("sf_row_stride", "int64"), T.dynamic("sf_column_stride", "int64")
    sf_out_strides = T.dynamic("sf_out_row_stride", "int64"), T.dynamic("sf_out_column_stride", "int64")

    @T.macro
    def scatter_part(x, positions, out, token_of, token, part, thread, rows, wide):
        place = T.alloc_local((num_topk,), "int64")
        value = T.alloc_local((per_unit,), dtype)
        for k in T.unroll(num_topk):
            place[k] = T.cast(positions[token, k], "int64")
        if sourced:
            if part == 0 and thread == 0:
                for k in T.unroll(num_topk):
                    if place[k] >= 0 and place[k] < rows:
                        token_of[place[k]] = T.cast(token, "int32")
        if wide != 0:
            if whole:
                if part * threads + thread < units:
                    for i in T.vectorized(per_unit):
                        value[i] = x[token, (part * threads + thread) * per_unit + i]
                    for k in T.unroll(num_topk):
                        if place[k] >= 0 and place[k] < rows:
                            for i in T.vectorized(per_unit):
                                out[place[k], (part * threads + thread) * per_unit + i] = value[i]
        else:
            for i in T.unroll(per_unit, unroll_factor=1):
                column = (part * per_unit + i) * threads + thread
                if column < hidden:
                    value[0] = x[token, column]
                    for k in T.unroll(num_topk):
                        if place[k] >= 0 and place[k] < rows:
                            out[place[k], column] = value[0]

    @T.macro
    def scatter_sf(sf, positions, sf_out, token, thread, rows):
        scale = T.alloc_local((1,), "int32")
        at = T.alloc_local((1,), "int64")
        for i in T.unroll((sf_columns + threads - 1) // threads, unroll_factor=1):
            if i * threads + thread < sf_columns:
                scale[0] = sf[token, i * threads + thread]
                for k in T.unroll(num_topk):
                    at[0] = T.cast(positions[token, k], "int64")
                    if at[0] >= 0 and at[0] < rows:
                        sf_out[at[0], i * threads + thread] = scale[0]

    @T.prim_func
    def expand_to_fused(
        x: T.Tensor((tokens, hidden), dtype),
        positions: T.Tensor((tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((rows,), "int32"),
        sf: T.StridedTensor((tokens, max(sf_columns, 1)), sf_strides, "int32"),
        out: T.Tensor((rows, hidden), dtype),
        sf_out: T.StridedTensor((sf_rows, max(sf_columns, 1)), sf_out_strides, "int32"),
        token_of: T.Tensor((rows,), "int32"),
        wide: T.int32,
        column_major: T.int32,
    ):
        clearing = T.ceildiv(rows, cleared) if cleared else 0
        with T.Kernel(tokens * parts + clearing, threads=threads) as block:
            T.annotate_min_blocks_per_sm(resident_blocks(threads, MIN_THREADS))
            thread = T.get_thread_binding()
            if block < tokens * parts:
                token = T.cast(T.truncdiv(block, parts), "int64")
                scatter_part(x, positions, out, token_of, token, T.truncmod(block, parts), thread, rows, wide)
                if sf_columns > 0:
                    if T.truncmod(block, parts) == 0:
                        scatter_sf(sf, positions, sf_out, token, thread, rows)
            elif cleared:
                first = (T.cast(block, "int64") - tokens * parts) * cleared
                clear_padding(pos_to_expert, out, sf_out, first, thread, rows, sf_rows, wide, column_major)

    return expand_to_fused
