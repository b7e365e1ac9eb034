"""Casts with one scale for each block of 32 or 128 rows and columns.

A thread block takes the rows of one block and 128 columns: one block of scales, or four. Column-major storage has its
padding rows, packed words their missing bytes as further thread blocks, which store zeros.
"""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, bits_of, fmax, octet_writer, stored_as, view
from tk_serving.quant.kernels.scales import default_floor, mode_of, scale_rule
from tk_serving.quant.kernels.sources import source
from tk_serving.quant.kernels.tiles import sf_tensor
from tk_serving.quant.scales import COLUMN, PACKED

COLUMNS = 128
OCTETS = COLUMNS // OCTET


def build(x, fmt, block, layout, round_sf, with_data, aligned):
    """``block``: (rows, columns) of a block; ``with_data``: False computes the scales only."""
    block_m, block_k = block
    read = source(x, aligned)
    write = octet_writer(fmt, aligned)
    mode = mode_of(layout, round_sf)
    rule, floor = scale_rule(fmt, mode), default_floor(fmt, mode)
    out_dtype, out_bytes = stored_as(fmt)
    threads = 2 * block_m if block_m == 128 else 4 * block_m
    warps, rows_per_step = threads // 32, threads // OCTETS
    steps = block_m // rows_per_step
    lanes = block_k // OCTET

    tokens, width = T.dynamic("tokens"), T.dynamic("width")
    down, across = T.dynamic("down"), T.dynamic("across")
    x_stride, stride = T.dynamic("x_stride", "int64"), T.dynamic("stride", "int64")

    @T.macro
    def store(sf, scale, row, column, inside):
        """The scale of block (row, column), 0 outside of the matrix."""
        if layout == PACKED:
            storage = view(sf, (sf.shape[1], stride, 4), "uint8")
            byte = T.if_then_else(inside, bits_of(scale) >> 23, T.int32(0))
            storage[0][column // 4, row, column % 4] = T.cast(byte, "uint8")
        elif layout == COLUMN:
            storage = view(sf, (sf.shape[1], stride), "float32")
            if column < sf.shape[1]:
                storage[0][column, row] = T.if_then_else(inside, scale, T.float32(0.0))
        else:
            if inside:
                sf[row, column] = scale

    @T.prim_func
    def per_block_cast(
        values: T.StridedTensor((tokens, width), (x_stride, 1), read.dtype),
        data: T.Tensor((tokens, width // OCTET * out_bytes), out_dtype),
        sf: sf_tensor(layout, down, across, stride),
    ):
        strips = stride if layout in (COLUMN, PACKED) else down
        tiles = across * (4 * block_k // COLUMNS) if layout == PACKED else T.ceildiv(width, COLUMNS)
        with T.Kernel(strips * tiles, threads=threads) as block_index:
            T.assume(width % OCTET == 0)
            thread = T.get_thread_binding()
            octets = width // OCTET
            # 32-bit division: a grid has fewer than 2^31 blocks.
            place = T.alloc_local((2,), "int32")
            place[0] = T.cast(block_index, "int32") // T.cast(tiles, "int32")
            place[1] = T.cast(block_index, "int32") % T.cast(tiles, "int32")
            row = T.cast(place[0], "int64") * block_m + thread // OCTETS
            octet = place[1] * OCTETS + thread % OCTETS
            raw = T.alloc_local((steps * OCTET,), read.dtype)
            eight = T.alloc_local((OCTET,), "float32")
            amax = T.alloc_local((1,), "float32")
            most = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            of_warps = T.alloc_shared((warps, OCTETS // lanes), "float32")
            amax[0] = T.float32(0.0)
            # Rows and columns past an edge are replaced by the last ones, which changes no maximum: no load waits
            # behind a branch.
            for s in T.unroll(steps):
                read.load(values, T.min(row + s * rows_per_step, tokens - 1), T.min(octet, octets - 1), raw, s)
            for s in T.unroll(steps):
                read.maximum(raw, s, most)
                amax[0] = fmax(amax[0], most[0])
            # Over the lanes of a block of columns, then over the two rows of a warp, then over the warps.
            for step in T.unroll(lanes.bit_length() - 1):
                amax[0] = fmax(amax[0], T.shfl_xor(amax[0], 1 << step))
            amax[0] = fmax(amax[0], T.shfl_xor(amax[0], OCTETS))
            if thread % 32 < OCTETS and thread % lanes == 0:
                of_warps[thread // 32, thread % OCTETS // lanes] = amax[0]
            T.sync_threads()
            for w in T.unroll(warps):
                amax[0] = fmax(amax[0], of_warps[w, thread % OCTETS // lanes])
            rule(amax[0], T.float32(floor), scale, inverse)
            if thread < OCTETS and thread % lanes == 0:
                store(sf, scale[0], place[0], octet // lanes, place[0] < down and octet < octets)
            if with_data:
                if place[0] < down and octet < octets:
                    for s in T.unroll(steps):
                        read.decode(raw, s, eight)
                        write(data, T.min(row + s * rows_per_step, tokens - 1), octet, eight, inverse[0])

    return per_block_cast
