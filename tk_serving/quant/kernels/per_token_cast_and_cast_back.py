"""Cast and cast-back of groups of columns in registers, in place."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, e2m1_word, fmax, strided_writer, value_of_e2m1
from tk_serving.quant.kernels.scales import default_floor, mode_of, scale_rule
from tk_serving.quant.kernels.sources import source
from tk_serving.quant.kernels.tiles import HALVES, WARPS, first_octet, grid, row_of


def build(x, fmt, npc, layout, round_sf, aligned):
    """Groups of ``npc`` = 16, 32, 64 or 128 columns; ``layout`` says the type of the scales."""
    read = source(x, aligned)
    mode = mode_of(layout, round_sf)
    rule, floor = scale_rule(fmt, mode), default_floor(fmt, mode)
    lanes = npc // OCTET
    write = strided_writer(x, aligned)

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

    tokens, width, x_stride = T.dynamic("tokens"), T.dynamic("width"), T.dynamic("x_stride", "int64")

    @T.prim_func
    def cast_and_cast_back(values: T.StridedTensor((tokens, width), (x_stride, 1), x)):
        with T.Kernel(*grid(width // OCTET, tokens), threads=32 * WARPS) as (bx, by, bz):
            T.assume(width % OCTET == 0)
            thread = T.get_thread_binding()
            octets = width // OCTET
            row = row_of(by, bz, thread)
            octet = first_octet(bx, thread)
            raw = T.alloc_local((HALVES * OCTET,), x)
            eight = T.alloc_local((OCTET,), "float32")
            rounded = T.alloc_local((OCTET,), x)
            amax = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            for h in T.unroll(HALVES):
                if row < tokens and octet + h * 32 < octets:
                    read.load(values, row, octet + h * 32, raw, h)
            for h in T.unroll(HALVES):
                amax[0] = T.float32(0.0)
                if row < tokens and octet + h * 32 < octets:
                    read.maximum(raw, h, amax)
                for step in T.unroll(lanes.bit_length() - 1):
                    amax[0] = fmax(amax[0], T.shfl_xor(amax[0], 1 << step))
                rule(amax[0], T.float32(floor), scale, inverse)
                if row < tokens and octet + h * 32 < octets:
                    read.decode(raw, h, eight)
                    there_and_back(eight, inverse[0], scale[0])
                    for i in T.vectorized(OCTET):
                        rounded[i] = T.cast(eight[i], x)
                    write(values, row, octet + h * 32, rounded, 0)

    return cast_and_cast_back
