"""Scatter of token rows: a block reads one part of a row once and writes it to all positions of the token.

Further blocks of the same launch fill the padding rows, or only their scales, with zeros, or write the scales of all
rows. Rows are cut into parts, so that a single token already keeps several multiprocessors busy.
"""

import tilelang.language as T

from tk_serving.moe.kernels.gather_sf import TILE, column_parts, tile_writer
from tk_serving.moe.kernels.rows import VECTOR, padding_clearer, resident_blocks, rows_to_clear, threads_for

MIN_THREADS = 1536
NOTING = 256  # threads of a block that notes tokens
LOCAL_MEMORY = {"build": "8 bytes at the register bound that keeps enough warps on an SM"}


def sources(num_topk: int):
    """Note the token of every row that a pair names."""
    tokens, rows = T.dynamic("tokens", "int64"), T.dynamic("rows", "int64")

    @T.prim_func
    def expand_to_fused_sources(
        positions: T.Tensor((tokens, num_topk), "int32"),
        token_of: T.Tensor((rows,), "int32"),
    ):
        with T.Kernel(T.ceildiv(tokens * num_topk, NOTING), threads=NOTING) as block:
            pair = T.cast(block, "int64") * NOTING + T.get_thread_binding()
            place = T.alloc_local((1,), "int64")
            if pair < tokens * num_topk:
                place[0] = T.cast(positions[T.truncdiv(pair, num_topk), T.truncmod(pair, num_topk)], "int64")
                if place[0] >= 0 and place[0] < rows:
                    token_of[place[0]] = T.cast(T.truncdiv(pair, num_topk), "int32")

    return expand_to_fused_sources


def build(hidden: int, itemsize: int, num_topk: int, sf_columns: int, sourced: bool, zero_padding: bool):
    """``sourced``: the token of every row is known, and some blocks write column-major scales by it."""
    dtype = {1: "int8", 2: "int16", 4: "int32"}[itemsize]
    per_unit = VECTOR // itemsize
    units = (hidden + per_unit - 1) // per_unit
    threads = threads_for(units)
    parts = (units + threads - 1) // threads
    whole = hidden % per_unit == 0  # else no row but the first starts on 16 bytes
    cleared_columns = 0 if sourced else sf_columns
    clear_padding = padding_clearer(hidden, dtype, threads, cleared_columns, zero_padding)
    cleared = rows_to_clear(zero_padding, cleared_columns)
    write_sf = tile_writer(sf_columns, threads // 32)
    sf_parts = column_parts(sf_columns)

    tokens, rows, sf_rows = (T.dynamic(name, "int64") for name in ("tokens", "rows", "sf_rows"))
    sf_strides = T.dynamic("sf_row_stride", "int64"), T.dynamic("sf_column_stride", "int64")
    sf_out_strides = T.dynamic("sf_out_row_stride", "int64"), T.dynamic("sf_out_column_stride", "int64")

    @T.macro
    def scatter_part(x, positions, out, token, part, thread, rows, wide):
        place = T.alloc_local((num_topk,), "int64")
        value = T.alloc_local((per_unit,), dtype)
        for k in T.unroll(num_topk):
            place[k] = T.cast(positions[token, k], "int64")
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
        tiles = T.ceildiv(sf_rows, TILE) * sf_parts if sourced else 0
        with T.Kernel(tokens * parts + clearing + tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(resident_blocks(threads, MIN_THREADS))
            thread = T.get_thread_binding()
            number = T.alloc_local((1,), "int32")  # among the blocks that write rows
            number[0] = T.cast(block, "int32")
            if sourced:
                # The first ones, so that what they wait for is behind what the others write.
                number[0] = number[0] - T.cast(tiles, "int32")
                if number[0] < 0:
                    first = T.cast(T.truncdiv(T.cast(block, "int32"), sf_parts), "int64") * TILE
                    part = T.truncmod(T.cast(block, "int32"), sf_parts)
                    write_sf(sf, token_of, pos_to_expert, sf_out, first, part, thread, tokens, rows, sf_rows)
            if number[0] >= 0:
                if number[0] < tokens * parts:
                    token = T.cast(T.truncdiv(number[0], parts), "int64")
                    scatter_part(x, positions, out, token, T.truncmod(number[0], parts), thread, rows, wide)
                    if sf_columns > 0 and not sourced:
                        if T.truncmod(number[0], parts) == 0:
                            scatter_sf(sf, positions, sf_out, token, thread, rows)
                elif cleared:
                    first = (T.cast(number[0], "int64") - tokens * parts) * cleared
                    clear_padding(pos_to_expert, out, sf_out, first, thread, rows, sf_rows, wide, column_major)

    return expand_to_fused
