"""Cast and cast-back of groups of columns in registers, in place."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, e2m1_word, fmax, value_of_e2m1, view
from tk_serving.quant.kernels.scales import default_floor, mode_of, scale_rule
from tk_serving.quant.kernels.sources import source
from tk_serving.quant.kernels.tiles import HALVES, WARPS, first_octet, first_row, grid


def build(x, fmt, npc, layout, round_sf, rows, aligned):
    """Groups of ``npc`` = 16, 32, 64 or 128 columns; ``layout`` says the type of the scales; ``rows`` of a warp."""
    read = source(x, aligned)
    mode = mode_of(layout, round_sf)
    rule, floor = scale_rule(fmt, mode), default_floor(fmt, mode)
    lanes = npc // OCTET
    count = HALVES * rows
    piece = 4 if x == "float32" else OCTET  # elements of one vector access

    @T.macro
    def there_and_back(eight, multiplier, scale):
        if fmt == "e2m1":
            word = T.alloc_local((1,), "int32")
            e2m1_word(eight, multiplier, word)
            for i in T.unroll(OCTET):
                eight[i] = value_of_e2m1((word[0] >> (4 * i)) & 15) * scale
        else:
            codes = T.alloc_local((OCTET,), "float8_e4m3fn")
            for i in T.vectorized(OCTET):
                codes[i] = T.cast(eight[i] * multiplier, "float8_e4m3fn")
            for i in T.unroll(OCTET):
                eight[i] = T.cast(codes[i], "float32") * scale

    @T.macro
    def store(values, row, octet, eight):
        rounded = T.alloc_local((OCTET,), x)
        for i in T.vectorized(OCTET):
            rounded[i] = T.cast(eight[i], x)
        if aligned:
            shape, strides = (
                (values.shape[0], values.shape[1] // piece, piece),
                (values.strides[0] // piece * piece, piece, 1),
            )
            pieces = view(values, shape, x, strides)
            for j in T.unroll(OCTET // piece):
                for i in T.vectorized(piece):
                    pieces[0][row, octet * (OCTET // piece) + j, i] = rounded[j * piece + i]
        else:
            for i in T.unroll(OCTET):
                values[row, octet * OCTET + i] = rounded[i]

    tokens, width, x_stride = T.dynamic("tokens"), T.dynamic("width"), T.dynamic("x_stride", "int64")

    @T.prim_func
    def cast_and_cast_back(values: T.StridedTensor((tokens, width), (x_stride, 1), x)):
        with T.Kernel(*grid(width // OCTET, tokens, rows), threads=32 * WARPS) as (bx, by, bz):
            T.assume(width % OCTET == 0)
            thread = T.get_thread_binding()
            octets = width // OCTET
            row = first_row(by, bz, thread, rows)
            octet = first_octet(bx, thread)
            raw = T.alloc_local((count * OCTET,), x)
            eight = T.alloc_local((OCTET,), "float32")
            amax = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            for r in T.unroll(rows):
                for h in T.unroll(HALVES):
                    if row + r < tokens and octet + h * 32 < octets:
                        read.load(values, row + r, octet + h * 32, raw, h * rows + r)
            for r in T.unroll(rows):
                for h in T.unroll(HALVES):
                    amax[0] = T.float32(0.0)
                    if row + r < tokens and octet + h * 32 < octets:
                        read.decode(raw, h * rows + r, eight)
                        for i in T.unroll(OCTET):
                            amax[0] = fmax(amax[0], T.abs(eight[i]))
                    for step in T.unroll(lanes.bit_length() - 1):
                        amax[0] = fmax(amax[0], T.shfl_xor(amax[0], 1 << step))
                    rule(amax[0], T.float32(floor), scale, inverse)
                    if row + r < tokens and octet + h * 32 < octets:
                        there_and_back(eight, inverse[0], scale[0])
                        store(values, row + r, octet + h * 32, eight)

    return cast_and_cast_back
