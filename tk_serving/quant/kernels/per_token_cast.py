"""Casts with one scale for each group of columns of a token (``by_group``) or for each token (``by_token``)."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, bits_of, fmax, stored_as
from tk_serving.quant.kernels.rounding import rounding_writer
from tk_serving.quant.kernels.scales import STORED, default_floor, mode_of, scale_rule
from tk_serving.quant.kernels.sources import block_factor, source
from tk_serving.quant.kernels.tiles import (
    HALVES,
    WARPS,
    first_octet,
    grid,
    group_scales,
    max_of_row,
    row_of,
    sf_tensor,
)
from tk_serving.quant.scales import COLUMN, E4M3_COLUMN, PACKED


def by_group(x, x_sf, x_block, fmt, npc, layout, round_sf, with_data, stochastic, aligned):
    """Scales of groups of 16, 32, 64 or 128 columns.

    Args:
        x: source name; its scales have dtype ``x_sf`` (None: plain values) and blocks ``x_block``.
        with_data: False computes the scales only.
        stochastic: round with random bits of the state.
    """
    read = source(x, aligned)
    load_factor = block_factor(x_sf, *x_block)
    store = rounding_writer(fmt, aligned, stochastic)
    scales = group_scales(fmt, npc, layout, round_sf)
    floor = default_floor(fmt, mode_of(layout, round_sf))
    column_major = layout in (COLUMN, PACKED, E4M3_COLUMN)

    tokens, width, blocks = T.dynamic("tokens"), T.dynamic("width"), T.dynamic("blocks")
    x_stride, stride = T.dynamic("x_stride", "int64"), T.dynamic("stride", "int64")
    x_rows, x_blocks = T.dynamic("x_rows"), T.dynamic("x_blocks")
    x_sf_0, x_sf_1 = T.dynamic("x_sf_0", "int64"), T.dynamic("x_sf_1", "int64")
    out_dtype, out_bytes = stored_as(fmt)

    @T.prim_func
    def per_token_cast(
        values: T.StridedTensor((tokens, width), (x_stride, 1), read.dtype),
        values_sf: T.StridedTensor((x_rows, x_blocks), (x_sf_0, x_sf_1), x_sf or "float32"),
        data: T.Tensor((tokens, width // read.columns * out_bytes), out_dtype),
        sf: sf_tensor(layout, tokens, blocks, stride),
        state: T.Tensor((1,), "int64"),
    ):
        padded = stride if column_major else tokens
        with T.Kernel(*grid(width // read.columns, padded), threads=32 * WARPS) as (bx, by, bz):
            T.assume(width % read.columns == 0)
            thread = T.get_thread_binding()
            octets = width // read.columns
            row = row_of(by, bz, thread)
            octet = first_octet(bx, thread)
            raw = T.alloc_local((HALVES * read.columns,), read.dtype)
            factor = T.alloc_local((HALVES,), "float32")
            amax = T.alloc_local((HALVES,), "float32")
            inverse = T.alloc_local((HALVES,), "float32")
            live = T.alloc_local((1,), "int32")
            most = T.alloc_local((1,), "float32")
            eight = T.alloc_local((OCTET,), "float32")
            live[0] = T.cast(row < tokens, "int32")
            for h in T.unroll(HALVES):
                if row < tokens and octet + h * 32 < octets:
                    read.load(values, row, octet + h * 32, raw, h)
                    load_factor(values_sf, row, octet + h * 32, factor, h)
            for h in T.unroll(HALVES):
                amax[h] = T.float32(0.0)
                if row < tokens and octet + h * 32 < octets:
                    read.maximum(raw, h, most)
                    amax[h] = most[0] * factor[h]
            scales(amax, inverse, sf, stride, row, octet, octets, tokens, live, T.float32(floor))
            if with_data:
                for h in T.unroll(HALVES):
                    if row < tokens and octet + h * 32 < octets:
                        read.decode(raw, h, eight)
                        store(data, row, octet + h * 32, octets, eight, factor[h] * inverse[h], state)

    return per_token_cast


def by_token(x, x_sf, x_block, fmt, layout, round_sf, with_data, warps, held, stochastic, aligned):
    """One scale for each token.

    Args:
        warps: warps of a token.
        held: octets that a lane keeps in registers; 0 reads the token twice instead.
    """
    read = source(x, aligned)
    load_factor = block_factor(x_sf, *x_block)
    store = rounding_writer(fmt, aligned, stochastic)
    mode = mode_of(layout, round_sf)
    rule = scale_rule(fmt, mode)
    floor = default_floor(fmt, mode)
    column_major = layout in (COLUMN, PACKED, E4M3_COLUMN)
    rows = WARPS if warps == 1 else 1
    lanes = 32 * warps
    kept = max(1, held)

    tokens, width = T.dynamic("tokens"), T.dynamic("width")
    x_stride, stride = T.dynamic("x_stride", "int64"), T.dynamic("stride", "int64")
    x_rows, x_blocks = T.dynamic("x_rows"), T.dynamic("x_blocks")
    x_sf_0, x_sf_1 = T.dynamic("x_sf_0", "int64"), T.dynamic("x_sf_1", "int64")
    out_dtype, out_bytes = stored_as(fmt)

    @T.macro
    def maximum(raw, factor, at, amax):
        most = T.alloc_local((1,), "float32")
        read.maximum(raw, at, most)
        amax[0] = fmax(amax[0], most[0] * factor[at])

    @T.prim_func
    def per_token_cast(
        values: T.StridedTensor((tokens, width), (x_stride, 1), read.dtype),
        values_sf: T.StridedTensor((x_rows, x_blocks), (x_sf_0, x_sf_1), x_sf or "float32"),
        data: T.Tensor((tokens, width // read.columns * out_bytes), out_dtype),
        sf: sf_tensor(layout, tokens, 1, stride),
        state: T.Tensor((1,), "int64"),
    ):
        padded = stride if column_major else tokens
        with T.Kernel(T.ceildiv(padded, rows), threads=lanes * rows) as block:
            T.assume(width % read.columns == 0)
            thread = T.get_thread_binding()
            octets = width // read.columns
            row = block * rows + thread // lanes
            octet = thread % lanes
            raw = T.alloc_local((kept * read.columns,), read.dtype)
            factor = T.alloc_local((kept,), "float32")
            amax = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            eight = T.alloc_local((OCTET,), "float32")
            amax[0] = T.float32(0.0)
            if held:
                for k in T.unroll(held):
                    if row < tokens and octet + k * lanes < octets:
                        read.load(values, row, octet + k * lanes, raw, k)
                        load_factor(values_sf, row, octet + k * lanes, factor, k)
                for k in T.unroll(held):
                    if row < tokens and octet + k * lanes < octets:
                        maximum(raw, factor, k, amax)
            else:
                for k in T.serial(T.ceildiv(octets, lanes)):
                    if row < tokens and octet + k * lanes < octets:
                        read.load(values, row, octet + k * lanes, raw, 0)
                        load_factor(values_sf, row, octet + k * lanes, factor, 0)
                        maximum(raw, factor, 0, amax)
            max_of_row(amax, thread, warps)
            rule(amax[0], T.float32(floor), scale, inverse)
            if octet == 0:
                if column_major:
                    storage = T.Tensor((1, stride), STORED[layout], sf.data)
                    if row < stride:
                        if row >= tokens:
                            scale[0] = T.float32(0.0)
                        if layout == PACKED:
                            storage[0, row] = bits_of(scale[0]) >> 23
                        else:
                            storage[0, row] = T.cast(scale[0], STORED[layout])
                elif row < tokens:
                    sf[row, 0] = T.cast(scale[0], STORED[layout])
            if with_data:
                if held:
                    for k in T.unroll(held):
                        if row < tokens and octet + k * lanes < octets:
                            read.decode(raw, k, eight)
                            store(data, row, octet + k * lanes, octets, eight, factor[k] * inverse[0], state)
                else:
                    for k in T.serial(T.ceildiv(octets, lanes)):
                        if row < tokens and octet + k * lanes < octets:
                            read.load(values, row, octet + k * lanes, raw, 0)
                            load_factor(values_sf, row, octet + k * lanes, factor, 0)
                            read.decode(raw, 0, eight)
                            store(data, row, octet + k * lanes, octets, eight, factor[0] * inverse[0], state)

    return per_token_cast
