"""The scale rule and the layouts of scales on the device."""

import struct

import tilelang.language as T

from tk_serving.quant.formats import FORMATS, LARGEST
from tk_serving.quant.kernels.formats import bits_of, float_of, fmax, fmin
from tk_serving.quant.scales import COLUMN, E4M3, E4M3_COLUMN, PACKED, ROW

ROUNDED, EXACT, EIGHT_BIT = "rounded", "exact", "e4m3"
"""Scale modes: a power of two, the float32 quotient, the quotient rounded to e4m3."""

STORED = {ROW: "float32", COLUMN: "float32", PACKED: "int32", E4M3: "float8_e4m3fn", E4M3_COLUMN: "float8_e4m3fn"}


def mode_of(layout, round_sf):
    return EIGHT_BIT if layout in (E4M3, E4M3_COLUMN) else ROUNDED if round_sf else EXACT


def default_floor(fmt, mode):
    return FORMATS[fmt].maximum * 2.0**-9 if mode == EIGHT_BIT else FORMATS[fmt].floor


def scale_rule(fmt, mode, divided=True):
    """Macro ``rule(amax, floor, scale, inverse)``: amax[0] becomes the scale and the multiplier applied to x.

    Without ``divided`` the power of two of a rounded scale comes from the bits of amax alone, with the same result;
    floor has to be such that its quotient by the largest code is normal.
    """
    maximum = FORMATS[fmt].maximum
    pattern = struct.unpack("<I", struct.pack("<f", maximum))[0]
    power, mantissa = (pattern >> 23) - 127, pattern & 0x7FFFFF

    @T.macro
    def rule_of_bits(amax, floor, scale, inverse):
        bits = T.alloc_local((1,), "int32")
        bits[0] = (bits_of(fmax(fmin(amax, T.float32(LARGEST)), floor)) + (0x7FFFFF - mantissa)) & 0x7F800000
        scale[0] = float_of(bits[0] - (power << 23))
        inverse[0] = float_of(T.int32(((254 + power) << 23) - (1 << 32) * (power > 1)) - bits[0])  # wraps

    @T.macro
    def rule(amax, floor, scale, inverse):
        capped = T.alloc_local((1,), "float32")
        quotient = T.alloc_local((1,), "float32")
        capped[0] = fmax(fmin(amax, T.float32(LARGEST)), floor)
        quotient[0] = capped[0] / T.float32(maximum)
        if mode == ROUNDED:
            bits = T.alloc_local((1,), "int32")
            bits[0] = (bits_of(quotient[0]) + 0x7FFFFF) & 0x7F800000
            scale[0] = float_of(bits[0])
            inverse[0] = float_of((254 << 23) - bits[0])
        elif mode == EIGHT_BIT:
            scale[0] = T.cast(T.cast(quotient[0], "float8_e4m3fn"), "float32")
            inverse[0] = T.float32(1.0) / scale[0]
        else:
            scale[0] = quotient[0]
            inverse[0] = T.float32(maximum) / capped[0]

    return rule if divided or mode != ROUNDED else rule_of_bits


def scale_of_exponent(exponent):
    """float32 of a UE8M0 byte: 0 is 2^-127, 255 is NaN."""
    bits = T.if_then_else(exponent == 0, T.int32(1 << 22), exponent << 23)
    return float_of(T.if_then_else(exponent == 255, T.int32(0x7FC00000), bits))


def exponent_reader(dtype):
    """Expression ``read(sf, row, block)``: the biased exponent of a float32 or packed scale, whatever its mantissa."""
    if dtype == "int32":
        return lambda sf, row, block: (sf[row, block // 4] >> (8 * (block % 4))) & 255
    return lambda sf, row, block: (bits_of(sf[row, block]) >> 23) & 255
