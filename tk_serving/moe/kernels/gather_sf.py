"""Column-major scales of expert-major rows: read by token, turned over in shared memory, written by column.

A block makes a tile of 32 rows and 32 columns, or 64 where there are more. Padding rows, and those behind the last that
columns are padded with, have scale 0.
"""

import tilelang.language as T

TILE = 32
WARPS = 4
FULL = 0xFFFFFFFF


def spans(columns: int) -> int:
    """Columns of a tile, in ``TILE``."""
    return 2 if columns > TILE else 1


def column_parts(columns: int) -> int:
    """Tiles beside each other."""
    return -(-columns // (TILE * spans(columns)))


def tile_writer(columns: int, warps: int):
    """Macro ``write(sf, token_of, pos_to_expert, out, first, part, thread, tokens, rows, sf_rows)`` for one tile.

    Each lane learns the token of one row, so that all scales are under way together: loads past an edge, or of rows
    without a token, repeat another one and are no branches.
    """
    each = (TILE + warps - 1) // warps  # rows, then columns, of a warp
    span = spans(columns)

    @T.macro
    def write(sf, token_of, pos_to_expert, out, first, part, thread, tokens, rows, sf_rows):
        lane = thread % 32
        warp = thread // 32
        tile = T.alloc_shared((warps * each, span * TILE + 1), "int32")
        token = T.alloc_local((1,), "int32")
        owner = T.alloc_local((1,), "int32")
        at = T.alloc_local((each,), "int32")
        word = T.alloc_local((each * span,), "int32")
        token[0] = -1
        owner[0] = -1
        if first + lane < rows:
            token[0] = token_of[first + lane]
            owner[0] = pos_to_expert[first + lane]
        # A row that no pair names has no token.
        if owner[0] < 0 or T.cast(token[0], "int64") >= tokens:
            token[0] = -1
        for i in T.unroll(each * span):
            word[i] = 0
        if T.call_extern("uint32", "__ballot_sync", T.uint32(FULL), T.cast(token[0] >= 0, "int32")) != T.uint32(0):
            for i in T.unroll(each):
                at[i] = T.shfl_sync(token[0], T.min(warp * each + i, TILE - 1), 32)
            for i in T.unroll(each):
                for s in T.unroll(span):
                    column = T.min((part * span + s) * TILE + lane, columns - 1)
                    word[i * span + s] = sf[T.cast(T.max(at[i], 0), "int64"), column]
            for i in T.unroll(each):
                for s in T.unroll(span):
                    word[i * span + s] = T.if_then_else(at[i] >= 0, word[i * span + s], 0)
        for i in T.unroll(each):
            for s in T.unroll(span):
                tile[warp * each + i, s * TILE + lane] = word[i * span + s]
        T.sync_threads()
        for s in T.unroll(span):
            for i in T.unroll(each):
                column = (part * span + s) * TILE + warp * each + i
                if warp * each + i < TILE and first + lane < sf_rows and column < columns:
                    out[first + lane, column] = tile[lane, s * TILE + warp * each + i]

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
        with T.Kernel(T.ceildiv(sf_rows, TILE), column_parts(columns), threads=32 * WARPS) as (block, part):
            thread = T.get_thread_binding()
            first = T.cast(block, "int64") * TILE
            write(sf, token_of, pos_to_expert, out, first, part, thread, tokens, rows, sf_rows)

    return gather_sf
