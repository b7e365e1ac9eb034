"""The tile of a warp in casts with one scale per group of columns, and the scales of its groups.

A warp takes 512 columns of ``rows`` neighbouring tokens: a lane has eight columns in each half of 256, so loads are
16 bytes and a group of 16 ... 128 columns is 2 ... 16 lanes, whose maximum takes shuffles only. 512 columns hold whole
words of four UE8M0 exponents, and neighbouring tokens are neighbours in column-major scales: both are stored as words.
Arrays over a tile are indexed ``half * rows + row``.
"""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, bits_of, fmax
from tk_serving.quant.kernels.scales import STORED, mode_of, scale_rule
from tk_serving.quant.scales import COLUMN, E4M3_COLUMN, PACKED

WARPS = 4
HALVES = 2
OCTETS = 32 * HALVES
"""Groups of eight columns in a tile."""

GRID_Y = 32768


def grid(octets, rows, per_warp):
    """Blocks: tiles along a row, then groups of ``WARPS * per_warp`` rows folded into two dimensions."""
    groups = T.ceildiv(rows, WARPS * per_warp)
    return T.ceildiv(octets, OCTETS), T.min(groups, GRID_Y), T.ceildiv(groups, GRID_Y)


def first_row(by, bz, thread, per_warp):
    return ((bz * GRID_Y + by) * WARPS + thread // 32) * per_warp


def first_octet(bx, thread):
    return bx * OCTETS + thread % 32


@T.macro
def max_of_row(amax, thread, warps):
    """amax[0] becomes the maximum over the ``warps`` warps of a row: over the warp alone, or over the block."""
    for step in T.unroll(5):
        amax[0] = fmax(amax[0], T.shfl_xor(amax[0], 1 << step))
    if warps > 1:
        shared = T.alloc_shared((warps,), "float32")
        if thread % 32 == 0:
            shared[thread // 32] = amax[0]
        T.sync_threads()
        for w in T.unroll(warps):
            amax[0] = fmax(amax[0], shared[w])


def sf_tensor(layout, rows, blocks, stride):
    """Annotation of the scale output."""
    if layout in (COLUMN, PACKED, E4M3_COLUMN):
        return T.StridedTensor((rows, blocks), (1, stride), STORED[layout])
    return T.Tensor((rows, blocks), STORED[layout])


def group_scales(fmt, npc, layout, round_sf, rows):
    """Macro ``scales(amax, inverse, sf, stride, row, octet, octets, tokens, live, floor)``.

    Turns the maxima of the lanes into the multipliers of the groups and stores the scales. A row r with live[r] == 0
    gets scale 0; rows from ``tokens`` to ``stride`` are the padding of column-major storage.
    """
    lanes = npc // OCTET
    mode = mode_of(layout, round_sf)
    rule = scale_rule(fmt, mode)
    dtype = STORED[layout]
    count = HALVES * rows

    @T.macro
    def store_rows(sf, values, row, octet, octets, tokens):
        for h in T.unroll(HALVES):
            for r in T.unroll(rows):
                if octet + h * 32 < octets and row + r < tokens:
                    sf[row + r, (octet + h * 32) // lanes] = values[h * rows + r]

    @T.macro
    def store_columns(sf, values, row, octet, octets, stride):
        storage = T.Tensor((sf.shape[1], stride // rows, rows), dtype, sf.data)
        tile = T.alloc_local((1,), "int64")
        tile[0] = row // rows
        for h in T.unroll(HALVES):
            if octet + h * 32 < octets and row < stride:
                for r in T.vectorized(rows):
                    storage[(octet + h * 32) // lanes, tile[0], r] = values[h * rows + r]

    @T.macro
    def store_words(sf, exponents, row, octet, octets, stride, lane):
        """A word holds the exponents of four groups: of both halves where a group is 16 lanes."""
        storage = T.Tensor((sf.shape[1], stride // rows, rows), dtype, sf.data)
        tile = T.alloc_local((1,), "int64")
        tile[0] = row // rows
        words = T.alloc_local((count,), "int32")
        for h in T.unroll(HALVES):
            for r in T.unroll(rows):
                words[h * rows + r] = 0
                if octet + h * 32 < octets:
                    words[h * rows + r] = exponents[h * rows + r] << (8 * ((octet + h * 32) // lanes % 4))
        if lanes == 16:
            for r in T.unroll(rows):
                words[r] = words[r] | words[rows + r]
                words[r] = words[r] | T.shfl_xor(words[r], 16)
            if lane == 0 and row < stride:
                for r in T.vectorized(rows):
                    storage[octet // 64, tile[0], r] = words[r]
        else:
            for at in T.unroll(count):
                words[at] = words[at] | T.shfl_xor(words[at], lanes)
                words[at] = words[at] | T.shfl_xor(words[at], 2 * lanes)
            if lane % (4 * lanes) == 0:
                for h in T.unroll(HALVES):
                    if octet + h * 32 < octets and row < stride:
                        for r in T.vectorized(rows):
                            storage[(octet + h * 32) // (4 * lanes), tile[0], r] = words[h * rows + r]

    @T.macro
    def scales(amax, inverse, sf, stride, row, octet, octets, tokens, live, floor):
        scale = T.alloc_local((1,), "float32")
        multiplier = T.alloc_local((1,), "float32")
        stored = T.alloc_local((count,), dtype)
        for h in T.unroll(HALVES):
            for r in T.unroll(rows):
                for step in T.unroll(lanes.bit_length() - 1):
                    amax[h * rows + r] = fmax(amax[h * rows + r], T.shfl_xor(amax[h * rows + r], 1 << step))
                rule(amax[h * rows + r], floor, scale, multiplier)
                inverse[h * rows + r] = multiplier[0]
                if live[r] == 0:
                    scale[0] = T.float32(0.0)
                if layout == PACKED:
                    stored[h * rows + r] = bits_of(scale[0]) >> 23
                else:
                    stored[h * rows + r] = T.cast(scale[0], dtype)
        lane = octet % 32
        if layout == PACKED:
            store_words(sf, stored, row, octet, octets, stride, lane)
        elif lane % lanes == 0:
            if layout in (COLUMN, E4M3_COLUMN):
                store_columns(sf, stored, row, octet, octets, stride)
            else:
                store_rows(sf, stored, row, octet, octets, tokens)

    return scales
