"""How rows are cut into parts, and how padding rows, or their scales alone, are cleared."""

import tilelang.language as T

VECTOR = 16  # bytes
ROWS_PER_BLOCK = 8  # positions that one block looks through for padding
SF_ROWS_PER_BLOCK = 32  # where it clears scales only: a column of theirs is 128 bytes


def threads_for(units: int) -> int:
    """Threads of a block, one for each unit of a part: full warps, about 128, such that the parts come out even."""
    parts = (units + 127) // 128
    return ((units + parts - 1) // parts + 31) // 32 * 32


def resident_blocks(threads: int, wanted_threads: int) -> int:
    """Blocks on a multiprocessor that registers must leave room for."""
    return min(32, wanted_threads // threads)


def rows_to_clear(zero_padding: bool, sf_columns: int) -> int:
    """Rows for each of the blocks that clear; 0 where nothing is to be cleared."""
    if zero_padding:
        return ROWS_PER_BLOCK
    return SF_ROWS_PER_BLOCK if sf_columns else 0


def padding_clearer(columns: int, dtype: str, threads: int, sf_columns: int, zero_padding: bool):
    """Macro ``clear(pos_to_expert, out, sf_out, first, thread, rows, sf_rows, wide, column_major)`` for one block.

    Of the rows from ``first`` on it clears those without an expert (with ``zero_padding``), and their scales; and the
    scales of the rows from ``rows`` to ``sf_rows``, the padding of column-major storage. With ``wide`` rows of ``out``
    start on 16 bytes; ``column_major`` tells how the scales are stored.
    """
    per_unit = VECTOR // {"int8": 1, "int16": 2, "int32": 4}[dtype]
    units = columns // per_unit
    each = rows_to_clear(zero_padding, sf_columns)

    @T.macro
    def clear_sf(pos_to_expert, sf_out, first, thread, rows, sf_rows, column_major):
        """With neighbouring threads on what is contiguous: rows of a column, or columns of a row."""
        row = T.alloc_local((1,), "int32")
        column = T.alloc_local((1,), "int32")
        clears = T.alloc_local((1,), "int32")
        for i in T.serial((sf_columns * each + threads - 1) // threads):
            row[0] = (i * threads + thread) % each
            column[0] = (i * threads + thread) // each
            if column_major == 0:
                row[0] = (i * threads + thread) // sf_columns
                column[0] = (i * threads + thread) % sf_columns
            if row[0] < each and column[0] < sf_columns and first + row[0] < sf_rows:
                clears[0] = -1
                if first + row[0] < rows:
                    clears[0] = pos_to_expert[first + row[0]]
                if clears[0] < 0:
                    sf_out[first + row[0], column[0]] = 0

    @T.macro
    def clear_rows(pos_to_expert, out, first, thread, rows, wide):
        padding = T.alloc_local((ROWS_PER_BLOCK,), "int32")
        nothing = T.alloc_local((per_unit,), dtype)
        for i in T.unroll(per_unit):
            nothing[i] = 0
        for r in T.unroll(ROWS_PER_BLOCK):
            padding[r] = 0
            if first + r < rows:
                padding[r] = pos_to_expert[first + r]
        for r in T.unroll(ROWS_PER_BLOCK):
            if padding[r] < 0:
                if wide != 0:
                    if columns % per_unit == 0:
                        for i in T.serial((units + threads - 1) // threads):
                            if i * threads + thread < units:
                                for j in T.vectorized(per_unit):
                                    out[first + r, (i * threads + thread) * per_unit + j] = nothing[j]
                else:
                    for i in T.unroll((columns + threads - 1) // threads, unroll_factor=1):
                        if i * threads + thread < columns:
                            out[first + r, i * threads + thread] = nothing[0]

    @T.macro
    def clear(pos_to_expert, out, sf_out, first, thread, rows, sf_rows, wide, column_major):
        if zero_padding:
            clear_rows(pos_to_expert, out, first, thread, rows, wide)
        if sf_columns > 0:
            clear_sf(pos_to_expert, sf_out, first, thread, rows, sf_rows, column_major)

    return clear
