"""Quantise and scatter: a warp turns 512 columns of a token into codes and scales, and writes them to all positions.

A lane has 16 columns, so that it stores 16 bytes of FP8; groups of 32 or 128 columns are 2 or 8 lanes, and four of
them, whose exponents fill a word, lie within the warp. Further blocks of the same launch clear the padding rows, or
only their scales.
"""

import tilelang.language as T

from tk_serving.moe.kernels.rows import padding_clearer, resident_blocks, rows_to_clear
from tk_serving.quant.kernels.formats import OCTET, bits_of, e2m1_word, fmax
from tk_serving.quant.kernels.scales import default_floor, mode_of, scale_rule
from tk_serving.quant.kernels.sources import source
from tk_serving.quant.scales import PACKED

WARPS = 4
THREADS = 32 * WARPS
COLUMNS = 2 * OCTET  # of a lane
MIN_THREADS = 1024


def build(
    hidden: int,
    x: str,
    aligned: bool,
    fmt: str,
    npc: int,
    layout: str,
    round_sf: bool,
    num_topk: int,
    sourced: bool,
    zero_padding: bool,
):
    """``sourced``: keep the scales by token, and note the token of every row, for a launch that follows."""
    read = source(x, aligned)
    mode = mode_of(layout, round_sf)
    rule = scale_rule(fmt, mode)
    floor = default_floor(fmt, mode)
    lanes = npc // COLUMNS  # of a group
    tiles = (hidden + 32 * COLUMNS - 1) // (32 * COLUMNS)
    blocks = (hidden + npc - 1) // npc
    sf_lanes = 4 * lanes if layout == PACKED else lanes  # of a stored word
    sf_columns = (blocks + 3) // 4 if layout == PACKED else blocks
    size = COLUMNS if fmt == "e4m3" else COLUMNS // 2  # bytes that a lane stores
    row_bytes = hidden // COLUMNS * size
    cleared_columns = 0 if sourced else sf_columns
    clear_padding = padding_clearer(row_bytes, "int8", THREADS, cleared_columns, zero_padding)
    cleared = rows_to_clear(zero_padding, cleared_columns)

    tokens, rows, sf_rows = (T.dynamic(name, "int64") for name in ("tokens", "rows", "sf_rows"))
    x_stride = T.dynamic("x_stride", "int64")
    sf_strides = T.dynamic("sf_row_stride", "int64"), T.dynamic("sf_column_stride", "int64")

    @T.macro
    def encode(values, inverse, words):
        """The codes of 16 values as int32 words."""
        if fmt == "e4m3":
            codes = T.alloc_local((COLUMNS,), "float8_e4m3fn")
            as_words = T.Tensor((size // 4,), "int32", data=codes.data, scope="local")
            for i in T.vectorized(COLUMNS):
                codes[i] = T.cast(values[i] * inverse, "float8_e4m3fn")
            for i in T.unroll(size // 4):
                words[i] = as_words[i]
        else:
            word = T.alloc_local((1,), "int32")
            eight = T.alloc_local((OCTET,), "float32")
            for h in T.unroll(2):
                for i in T.unroll(OCTET):
                    eight[i] = values[h * OCTET + i]
                e2m1_word(eight, inverse, word)
                words[h] = word[0]

    @T.prim_func
    def expand_to_fused_and_cast(
        values: T.StridedTensor((tokens, hidden), (x_stride, 1), read.dtype),
        positions: T.Tensor((tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((rows,), "int32"),
        data: T.Tensor((rows, row_bytes), "int8"),
        sf: T.StridedTensor((sf_rows, sf_columns), sf_strides, "int32"),
        token_of: T.Tensor((rows,), "int32"),
        wide: T.int32,
        column_major: T.int32,
    ):
        filled = rows if sourced else sf_rows
        clearing = T.ceildiv(filled, cleared) if cleared else 0
        with T.Kernel(T.ceildiv(tokens * tiles, WARPS) + clearing, threads=THREADS) as block:
            T.annotate_min_blocks_per_sm(resident_blocks(THREADS, MIN_THREADS))
            thread = T.get_thread_binding()
            lane = thread % 32
            casting = T.ceildiv(tokens * tiles, WARPS)
            data_words = T.Tensor((rows * (row_bytes // size), size // 4), "int32", data=data.data)
            place = T.alloc_local((num_topk,), "int32")
            raw = T.alloc_local((2 * OCTET,), read.dtype)
            eight = T.alloc_local((OCTET,), "float32")
            value = T.alloc_local((COLUMNS,), "float32")
            amax = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            stored = T.alloc_local((1,), "int32")
            words = T.alloc_local((size // 4,), "int32")
            at = T.alloc_local((1,), "int64")
            if block < casting:
                tile = block * WARPS + thread // 32
                if tile < tokens * tiles:
                    token = T.cast(T.truncdiv(tile, tiles), "int64")
                    column = T.truncmod(tile, tiles) * 32 + lane  # in units of 16
                    for k in T.unroll(num_topk):
                        place[k] = positions[token, k]
                    amax[0] = 0
                    if column < hidden // COLUMNS:
                        for h in T.unroll(2):
                            read.load(values, token, column * 2 + h, raw, h)
                        for h in T.unroll(2):
                            read.decode(raw, h, eight)
                            for i in T.unroll(OCTET):
                                value[h * OCTET + i] = eight[i]
                                amax[0] = fmax(amax[0], T.abs(eight[i]))
                    for step in T.unroll(lanes.bit_length() - 1):
                        amax[0] = fmax(amax[0], T.shfl_xor(amax[0], 1 << step))
                    rule(amax[0], T.float32(floor), scale, inverse)
                    if layout == PACKED:
                        stored[0] = 0
                        if column < hidden // COLUMNS:
                            stored[0] = (bits_of(scale[0]) >> 23) << (8 * (lane // lanes % 4))
                        stored[0] = stored[0] | T.shfl_xor(stored[0], lanes)
                        stored[0] = stored[0] | T.shfl_xor(stored[0], 2 * lanes)
                    else:
                        stored[0] = bits_of(scale[0])
                    if column < hidden // COLUMNS:
                        encode(value, inverse[0], words)
                        for k in T.unroll(num_topk):
                            if place[k] >= 0 and T.cast(place[k], "int64") < rows:
                                at[0] = T.cast(place[k], "int64")
                                if wide != 0:
                                    for i in T.vectorized(size // 4):
                                        data_words[at[0] * (row_bytes // size) + column, i] = words[i]
                                else:
                                    for i in T.unroll(size, unroll_factor=1):
                                        data[at[0], column * size + i] = T.cast(words[i // 4] >> (8 * (i % 4)), "int8")
                                if sourced:
                                    if column == 0:
                                        token_of[at[0]] = T.cast(token, "int32")
                                elif lane % sf_lanes == 0:
                                    sf[at[0], column // sf_lanes] = stored[0]
                        if sourced:
                            if lane % sf_lanes == 0:
                                sf[token, column // sf_lanes] = stored[0]
            elif cleared:
                first = (T.cast(block, "int64") - casting) * cleared
                clear_padding(pos_to_expert, data, sf, first, thread, rows, sf_rows, wide, column_major)

    return expand_to_fused_and_cast
