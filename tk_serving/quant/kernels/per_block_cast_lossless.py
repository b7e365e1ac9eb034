"""FP4 to FP8 with larger blocks: first the scales of the result, then its values."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, float_of, octet_writer, view
from tk_serving.quant.kernels.scales import exponent_reader, scale_of_exponent
from tk_serving.quant.kernels.sources import source
from tk_serving.quant.kernels.tiles import HALVES, WARPS, first_octet, grid, row_of, sf_tensor
from tk_serving.quant.scales import COLUMN, PACKED

RAISE = 6
THREADS = 128


def exponents(x_sf, ratio, layout):
    """Scales of blocks of ``ratio`` = (down, across) scales of dtype ``x_sf``; a few lanes take one block."""
    down, across = ratio
    count = down * across
    lanes = min(32, 1 << (count - 1).bit_length())
    exponent = exponent_reader(x_sf)
    x_rows, width, rows, blocks = (T.dynamic(name) for name in ("x_rows", "width", "rows", "blocks"))
    x_0, x_1, stride = (T.dynamic(name, "int64") for name in ("x_0", "x_1", "stride"))

    @T.prim_func
    def lossless_exponents(
        values_sf: T.StridedTensor((x_rows, width), (x_0, x_1), x_sf),
        sf: sf_tensor(layout, rows, blocks, stride),
    ):
        # With padding rows and the missing bytes of packed words, which are zero.
        strips = stride if layout in (COLUMN, PACKED) else rows
        columns = blocks * 4 if layout == PACKED else blocks
        with T.Kernel(T.ceildiv(strips * columns, THREADS // lanes), threads=THREADS) as block:
            thread = T.get_thread_binding()
            at = T.alloc_local((3,), "int64")
            most = T.alloc_local((1,), "int32")
            at[0] = T.cast(block, "int64") * (THREADS // lanes) + thread // lanes
            at[1] = at[0] // columns
            at[2] = at[0] % columns
            x_blocks = width * 4 if x_sf == "int32" else width
            most[0] = 0
            if at[1] < rows:
                for s in T.serial(T.ceildiv(count, lanes)):
                    entry = s * lanes + thread % lanes
                    row = at[1] * down + entry // across
                    column = at[2] * across + entry % across
                    if entry < count and row < x_rows and column < x_blocks:
                        most[0] = T.max(most[0], exponent(values_sf, row, column))
            for step in T.unroll(lanes.bit_length() - 1):
                most[0] = T.max(most[0], T.shfl_xor(most[0], 1 << step))
            most[0] = T.max(most[0] - RAISE, 0)
            inside = at[1] < rows and at[2] * across < x_blocks
            if thread % lanes == 0 and at[1] < strips:
                if layout == PACKED:
                    storage = view(sf, (blocks, stride, 4), "uint8")
                    byte = T.if_then_else(inside, most[0], 0)
                    storage[0][at[2] // 4, at[1], at[2] % 4] = T.cast(byte, "uint8")
                elif layout == COLUMN:
                    storage = view(sf, (blocks, stride), "float32")
                    storage[0][at[2], at[1]] = T.if_then_else(inside, scale_of_exponent(most[0]), T.float32(0.0))
                else:
                    sf[at[1], at[2]] = scale_of_exponent(most[0])

    return lossless_exponents


def values(x_sf, x_block, sf, sf_block, aligned):
    """The codes times 2^(exponent of the input - exponent of the output) as e4m3."""
    read = source("e2m1", aligned)
    write = octet_writer("e4m3", True)
    from_exponent, to_exponent = exponent_reader(x_sf), exponent_reader(sf)
    (x_m, x_k), (out_m, out_k) = x_block, sf_block

    tokens, width = T.dynamic("tokens"), T.dynamic("width")
    x_stride = T.dynamic("x_stride", "int64")
    x_rows, x_blocks, rows_, blocks = T.dynamic("x_rows"), T.dynamic("x_blocks"), T.dynamic("rows"), T.dynamic("blocks")
    x_sf_0, x_sf_1 = T.dynamic("x_sf_0", "int64"), T.dynamic("x_sf_1", "int64")
    sf_0, sf_1 = T.dynamic("sf_0", "int64"), T.dynamic("sf_1", "int64")

    @T.prim_func
    def lossless_values(
        data: T.StridedTensor((tokens, width), (x_stride, 1), "int8"),
        data_sf: T.StridedTensor((x_rows, x_blocks), (x_sf_0, x_sf_1), x_sf),
        out_sf: T.StridedTensor((rows_, blocks), (sf_0, sf_1), sf),
        out: T.Tensor((tokens, width * 2), "float8_e4m3fn"),
    ):
        with T.Kernel(*grid(width // read.columns, tokens), threads=32 * WARPS) as (bx, by, bz):
            T.assume(width % 16 == 0)
            thread = T.get_thread_binding()
            octets = width // read.columns
            row = row_of(by, bz, thread)
            octet = first_octet(bx, thread)
            raw = T.alloc_local((HALVES * read.columns,), "int8")
            shift = T.alloc_local((HALVES,), "int32")
            eight = T.alloc_local((OCTET,), "float32")
            for h in T.unroll(HALVES):
                if row < tokens and octet + h * 32 < octets:
                    read.load(data, row, octet + h * 32, raw, h)
                    column = (octet + h * 32) * OCTET
                    shift[h] = from_exponent(data_sf, row // x_m, column // x_k)
                    shift[h] -= to_exponent(out_sf, row // out_m, column // out_k)
            for h in T.unroll(HALVES):
                if row < tokens and octet + h * 32 < octets:
                    read.decode(raw, h, eight)
                    # Below 2^-126 every code rounds to zero.
                    factor = float_of((T.max(shift[h], -127) + 127) << 23)
                    write(out, row, octet + h * 32, eight, factor)

    return lossless_values
