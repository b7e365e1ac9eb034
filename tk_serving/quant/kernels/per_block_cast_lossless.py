"""FP4 to FP8 with larger blocks: first the scales of the result, then its values."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, float_of, value_of_e2m1, view
from tk_serving.quant.kernels.scales import exponent_reader, scale_of_exponent
from tk_serving.quant.kernels.tiles import GRID_Y, WARPS, row_of, sf_tensor
from tk_serving.quant.scales import COLUMN, PACKED

RAISE = 6
THREADS = 128


def exponents(x_sf, ratio, layout):
    """Scales of blocks of ``ratio`` = (down, across) scales of dtype ``x_sf``; a few lanes take one block."""
    down, across = ratio
    count = down * across
    at_once = min(8, -(-count // 32))
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
            found = T.alloc_local((at_once,), "int32")
            at[0] = T.cast(block, "int64") * (THREADS // lanes) + thread // lanes
            at[1] = at[0] // columns
            at[2] = at[0] % columns
            x_blocks = width * 4 if x_sf == "int32" else width
            most[0] = 0
            if at[1] < rows and at[2] * across < x_blocks:
                for part in T.serial(T.ceildiv(count, lanes * at_once)):
                    for s in T.unroll(at_once):
                        # Entries past an edge are replaced by others of the block.
                        entry = T.min((part * at_once + s) * lanes + thread % lanes, count - 1)
                        row = T.min(at[1] * down + entry // across, x_rows - 1)
                        column = T.min(at[2] * across + entry % across, x_blocks - 1)
                        found[s] = exponent(values_sf, row, column)
                    for s in T.unroll(at_once):
                        most[0] = T.max(most[0], found[s])
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


def permute(a, b, selector):
    """Bytes of the words a (0 ... 3) and b (4 ... 7), chosen by the four low nibbles of ``selector``."""
    return T.call_extern("int32", "__byte_perm", a, b, selector)


def values(x_sf, x_block, sf, sf_block, aligned):
    """The codes times 2^(exponent of the input - exponent of the output) as e4m3.

    A lane takes neighbouring octets with one scale. It computes the codes of the eight magnitudes, and a byte
    permutation looks four up at once.
    """
    from_exponent, to_exponent = exponent_reader(x_sf), exponent_reader(sf)
    (x_m, x_k), (out_m, out_k) = x_block, sf_block
    span = min(4, x_k // OCTET, out_k // OCTET)  # words of the input that a lane takes
    piece = min(4, 2 * span)  # words of the result in one store

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
        groups, units = T.ceildiv(tokens, WARPS), width // (4 * span)
        blocks_y = T.min(groups, GRID_Y)
        with T.Kernel(T.ceildiv(units, 32), blocks_y, T.ceildiv(groups, GRID_Y), threads=32 * WARPS) as (bx, by, bz):
            T.assume(width % 16 == 0)
            thread = T.get_thread_binding()
            unit = bx * 32 + thread % 32
            row = row_of(by, bz, thread)
            raw = T.alloc_local((4 * span,), "int8")
            words = view(raw, (span,), "int32", scope="local")
            shift = T.alloc_local((1,), "int32")
            magnitude = T.alloc_local((OCTET,), "float32")
            codes = T.alloc_local((OCTET,), "float8_e4m3fn")
            table = view(codes, (2,), "int32", scope="local")
            four = T.alloc_local((1,), "int32")
            result = T.alloc_local((2 * span,), "int32")
            place = T.alloc_local((1,), "int64")
            if row < tokens and unit < units:
                if aligned:
                    strides = (data.strides[0] // (4 * span) * span, span, 1)
                    pieces = view(data, (tokens, units, span), "int32", strides)
                    for i in T.vectorized(span):
                        words[0][i] = pieces[0][row, unit, i]
                else:
                    for i in T.unroll(4 * span):
                        raw[i] = data[row, unit * 4 * span + i]
                column = unit * (span * OCTET)
                shift[0] = from_exponent(data_sf, row // x_m, column // x_k)
                shift[0] -= to_exponent(out_sf, row // out_m, column // out_k)
                # Below 2^-126 every code rounds to zero.
                factor = float_of((T.max(shift[0], -127) + 127) << 23)
                for i in T.unroll(OCTET):
                    magnitude[i] = value_of_e2m1(i) * factor
                for i in T.vectorized(OCTET):
                    codes[i] = T.cast(magnitude[i], "float8_e4m3fn")
                for k in T.unroll(2 * span):
                    four[0] = words[0][k // 2] >> (16 * (k % 2))
                    result[k] = permute(table[0][0], table[0][1], four[0] & 0x7777)
                    result[k] = result[k] | permute(0x8000, 0, (four[0] >> 3) & 0x1111)  # the signs
                places = view(out, (tokens * units, 2 * span // piece, piece), "int32")
                place[0] = T.cast(row, "int64") * units + unit
                for j in T.unroll(2 * span // piece):
                    for i in T.vectorized(piece):
                        places[0][place[0], j, i] = result[j * piece + i]

    return lossless_values
