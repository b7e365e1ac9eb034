"""Column-major scales of expert-major rows: read by token, turned over in shared memory, written by column.

A block makes a tile of 32 rows and 32 columns. Padding rows, and those behind the last that columns are padded with,
have scale 0.
"""

import tilelang.language as T

TILE = 32
WARPS = 4


def tile_writer(columns: int, warps: int):
    """Macro ``write(sf, token_of, pos_to_expert, out, first, part, thread, tokens, rows, sf_rows)`` for one tile."""
    each = (TILE + warps - 1) // warps  # rows, then columns, of a warp

    @T.macro
    def write(sf, token_of, pos_to_expert, out, first, part, thread, tokens, rows, sf_rows):
        lane = thread % 32
        warp = thread // 32
        tile = T.alloc_shared((warps * each, TILE + 1), "int32")
        token = T.alloc_local((each,), "int64")
        word = T.alloc_local((each,), "int32")
        for i in T.unroll(each):
            token[i] = -1
            if first + warp * each + i < rows:
                token[i] = T.cast(token_of[first + warp * each + i], "int64")
                if pos_to_expert[first + warp * each + i] < 0:
                    token[i] = -1
        for i in T.unroll(each):
            word[i] = 0
            # A row that no pair names has no token.
            if token[i] >= 0 and token[i] < tokens and part * TILE + lane < columns:
                word[i] = sf[token[i], part * TILE + lane]
        for i in T.unroll(each):
            tile[warp * each + i, lane] = word[i]
        T.sync_threads()
        for i in T.unroll(each):
            if warp * each + i < TILE and first + lane < sf_rows and part * TILE + warp * each + i < columns:
                out[first + lane, part * TILE + warp * each + i] = tile[lane, warp * each + i]

    return write


def build(columns: int):
    tokens, rows, sf_rows = (T.dynamic(name, "int64") for name in ("tokens", "rows", "sf_rows"))
    sf_strides = T.dynamic("sf_row_stride", "int64"), T.dynamic("sf_column_stride", "int64")
    out_strides = T.dynamic("out_row_stride", "int64"), T.dynamic("out_column_stride", "int64")
    write = tile_writer(columns, WARPS)

    @T.prim_func
    def gather_sf(
        sf: T.StridedTensor((tokens, columns), sf_strides, "int32"),
        token_of: T.Tensor((rows,), "int32"),
        pos_to_expert: T.Tensor((rows,), "int32"),
        out: T.StridedTensor((sf_rows, columns), out_strides, "int32"),
    ):
        with T.Kernel(T.ceildiv(sf_rows, TILE), (columns + TILE - 1) // TILE, threads=32 * WARPS) as (block, part):
            thread = T.get_thread_binding()
            first = T.cast(block, "int64") * TILE
            write(sf, token_of, pos_to_expert, out, first, part, thread, tokens, rows, sf_rows)

    return gather_sf
