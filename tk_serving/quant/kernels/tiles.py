"""The tile of a warp in casts with one scale per group of columns, and the scales of its groups.

A warp takes 512 columns of a token: a lane has eight columns in each half of 256, so loads are 16 bytes and a group of
16 ... 128 columns is 2 ... 16 lanes, whose maximum takes shuffles only. 512 columns hold whole words of four UE8M0
exponents. More rows for each warp were slower: too much in flight for the L1 cache. With few rows a warp may take one
half alone, where that still holds whole words.
"""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, bits_of, fmax, view
from tk_serving.quant.kernels.scales import STORED, mode_of, scale_rule
from tk_serving.quant.scales import COLUMN, E4M3_COLUMN, PACKED

WARPS = 4
HALVES = 2
OCTETS = 32 * HALVES
"""Groups of eight columns in a tile."""

GRID_Y = 32768


def grid(octets, rows, halves=HALVES):
    """Blocks: tiles along a row, then groups of ``WARPS`` rows folded into two dimensions."""
    groups = T.ceildiv(rows, WARPS)
    return T.ceildiv(octets, 32 * halves), T.min(groups, GRID_Y), T.ceildiv(groups, GRID_Y)


def row_of(by, bz, thread):
    return (bz * GRID_Y + by) * WARPS + thread // 32


def first_octet(bx, thread, halves=HALVES):
    return bx * (32 * halves) + thread % 32


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


def inside(octet, half, octets, whole):
    """Whether a lane's octet of a half is in the row."""
    return True if whole else octet + half * 32 < octets


def group_scales(fmt, npc, layout, round_sf, whole=False, halves=HALVES, divided=True):
    """Macro ``scales(amax, inverse, sf, stride, row, octet, octets, tokens, live, floor)``.

    Turns the maxima of the lanes, one for each half, into the multipliers of the groups and stores the scales. A row
    with live[0] == 0 gets scale 0; rows from ``tokens`` to ``stride`` are the padding of column-major storage.

    Even lanes look after the first half, odd ones after the second, so that each computes one scale; then they exchange
    the multipliers. With one half every lane computes the scale of its group.
    """
    lanes = npc // OCTET
    mode = mode_of(layout, round_sf)
    rule = scale_rule(fmt, mode, divided)
    dtype = STORED[layout]
    column_major = layout in (COLUMN, PACKED, E4M3_COLUMN)

    @T.macro
    def store(sf, value, row, octet, octets, tokens, stride):
        """One scale, if the group is in the tensor."""
        if column_major:
            columns = view(sf, (sf.shape[1], stride), dtype)
            if (whole or octet < octets) and row < stride:
                columns[0][octet // lanes, row] = value
        else:
            if (whole or octet < octets) and row < tokens:
                sf[row, octet // lanes] = value

    @T.macro
    def store_word(sf, exponent, row, octet, octets, stride, half):
        """The exponents of four groups: of both halves where a group is 16 lanes."""
        words = view(sf, (sf.shape[1], stride), "int32")
        word = T.alloc_local((1,), "int32")
        word[0] = 0
        if whole or octet < octets:
            word[0] = exponent << (8 * (octet // lanes % 4))
        if lanes == 16:
            word[0] = word[0] | T.shfl_xor(word[0], 1)  # the other half
            word[0] = word[0] | T.shfl_xor(word[0], 16)
            if octet % 64 == 0 and (whole or octet // 64 < sf.shape[1]) and row < stride:
                words[0][octet // 64, row] = word[0]
        else:
            word[0] = word[0] | T.shfl_xor(word[0], lanes)
            word[0] = word[0] | T.shfl_xor(word[0], 2 * lanes)
            if octet % (4 * lanes) == half and (whole or octet < octets) and row < stride:
                words[0][octet // (4 * lanes), row] = word[0]

    @T.macro
    def scales(amax, inverse, sf, stride, row, octet, octets, tokens, live, floor):
        most = T.alloc_local((2,), "float32")
        scale = T.alloc_local((1,), "float32")
        multiplier = T.alloc_local((1,), "float32")
        half = octet % 2
        most[0] = T.if_then_else(half == 0, amax[0], amax[1])
        most[1] = T.if_then_else(half == 0, amax[1], amax[0])
        most[0] = fmax(most[0], T.shfl_xor(most[1], 1))
        for step in T.unroll(lanes.bit_length() - 2):
            most[0] = fmax(most[0], T.shfl_xor(most[0], 2 << step))
        rule(most[0], floor, scale, multiplier)
        if live[0] == 0:
            scale[0] = T.float32(0.0)
        at = octet + half * 32
        if layout == PACKED:
            store_word(sf, bits_of(scale[0]) >> 23, row, at, octets, stride, half)
        else:
            if octet % lanes == half:
                store(sf, T.cast(scale[0], dtype), row, at, octets, tokens, stride)
        for h in T.unroll(HALVES):
            inverse[h] = T.shfl_sync(multiplier[0], h, lanes)

    @T.macro
    def scales_of_half(amax, inverse, sf, stride, row, octet, octets, tokens, live, floor):
        most = T.alloc_local((1,), "float32")
        scale = T.alloc_local((1,), "float32")
        multiplier = T.alloc_local((1,), "float32")
        most[0] = amax[0]
        for step in T.unroll(lanes.bit_length() - 1):
            most[0] = fmax(most[0], T.shfl_xor(most[0], 1 << step))
        rule(most[0], floor, scale, multiplier)
        if live[0] == 0:
            scale[0] = T.float32(0.0)
        if layout == PACKED:
            store_word(sf, bits_of(scale[0]) >> 23, row, octet, octets, stride, 0)
        else:
            if octet % lanes == 0:
                store(sf, T.cast(scale[0], dtype), row, octet, octets, tokens, stride)
        inverse[0] = multiplier[0]

    return scales if halves == HALVES else scales_of_half
