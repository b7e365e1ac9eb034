"""Encoding and decoding of quantised values in registers, eight columns at a time.

Minima and maxima go through ``fminf`` and ``fmaxf``, which return the number where the other operand is NaN.
"""

import tilelang.language as T

from tk_serving.quant.formats import FORMATS

OCTET = 8
"""Columns that a lane reads, converts and writes together: 16 bytes of bfloat16."""


def fmin(a, b):
    return T.call_extern("float32", "fminf", a, b)


def fmax(a, b):
    return T.call_extern("float32", "fmaxf", a, b)


def bits_of(value):
    return T.reinterpret(value, "int32")


def float_of(bits):
    return T.reinterpret(bits, "float32")


def value_of_e2m1(code):
    """float32 of a 4-bit code: its exponent and mantissa as those of a (subnormal) float32, then rescaled."""
    return float_of(((code & 8) << 28) | ((code & 7) << 22)) * T.float32(2.0**126)


def value_of_e5m6(code):
    """float32 of a 12-bit code: the upper bits of a float16."""
    return T.cast(T.reinterpret(T.cast(code << 4, "uint16"), "float16"), "float32")


@T.macro
def e2m1_code(value, code):
    """code[0] = 4-bit code nearest to ``value``; NaN is +6.

    The float32 sum with a power of two whose last place is the step between codes at this magnitude holds the rounded
    multiple of the step in its low bits. Below 1 the step stays 0.5.
    """
    clamped = T.alloc_local((1,), "float32")
    power = T.alloc_local((1,), "int32")
    clamped[0] = fmax(fmin(value, T.float32(6.0)), T.float32(-6.0))
    power[0] = T.max(bits_of(clamped[0]) & 0x7F800000, 0x3F800000)
    shifted = T.alloc_local((1,), "float32")
    shifted[0] = T.abs(clamped[0]) + float_of(power[0] + (22 << 23))
    code[0] = bits_of(shifted[0]) - (power[0] + (22 << 23)) + (power[0] >> 22) - 254
    code[0] = code[0] | ((bits_of(clamped[0]) >> 28) & 8)


@T.macro
def e5m6_code(value, code):
    """code[0] = 12-bit code of ``value``: truncated to float16, then rounded by the 17 bits that are cut."""
    clamped = T.alloc_local((1,), "float32")
    low = T.alloc_local((1,), "int32")
    clamped[0] = fmax(fmin(value, T.float32(65024.0)), T.float32(-65024.0))
    size = bits_of(clamped[0]) & 0x7FFFFFFF
    if size < (127 - 14) << 23:
        code[0] = T.cast(T.abs(clamped[0]) * T.float32(2.0**20), "int32")
    else:
        code[0] = (size >> 17) - (112 << 6)
    low[0] = size & 0x1FFFF
    if low[0] + (code[0] & 1) > 0x10000:
        code[0] = code[0] + 1
    code[0] = code[0] | ((bits_of(clamped[0]) >> 20) & 0x800)


def stored_as(fmt):
    """(storage type, its elements for eight values) of a quantised format, bfloat16 or float32."""
    return (FORMATS[fmt].storage, FORMATS[fmt].bytes) if fmt in FORMATS else (fmt, OCTET)


def octet_writer(fmt, aligned):
    """Macro ``write(data, row, octet, values, multiplier)`` that stores eight values of a row.

    ``fmt`` is a quantised format, bfloat16 or float32; with ``aligned`` the rows of ``data`` start on 16 bytes.
    """
    dtype, size = stored_as(fmt)

    @T.macro
    def write_cast(data, row, octet, values, multiplier):
        codes = T.alloc_local((OCTET,), dtype)
        for i in T.vectorized(OCTET):
            codes[i] = T.cast(values[i] * multiplier, dtype)
        if aligned:
            for i in T.vectorized(OCTET):
                data[row, octet * OCTET + i] = codes[i]
        else:
            for i in T.unroll(OCTET):
                data[row, octet * OCTET + i] = codes[i]

    @T.macro
    def write_words(data, row, octet, words):
        if aligned:
            view = T.Tensor((data.shape[0], data.shape[1] // 4), "int32", data.data)
            for i in T.unroll(size // 4):
                view[row, octet * (size // 4) + i] = words[i]
        else:
            for i in T.unroll(size):
                data[row, octet * size + i] = T.cast(words[i // 4] >> (8 * (i % 4)), data.dtype)

    @T.macro
    def write_e2m1(data, row, octet, values, multiplier):
        words = T.alloc_local((1,), "int32")
        code = T.alloc_local((1,), "int32")
        words[0] = 0
        for i in T.unroll(OCTET):
            e2m1_code(values[i] * multiplier, code)
            words[0] = words[0] | (code[0] << (4 * i))
        write_words(data, row, octet, words)

    @T.macro
    def write_e5m6(data, row, octet, values, multiplier):
        words = T.alloc_local((3,), "int32")
        code = T.alloc_local((1,), "int32")
        c = T.alloc_local((OCTET,), "int32")
        for i in T.unroll(OCTET):
            e5m6_code(values[i] * multiplier, code)
            c[i] = code[0]
        words[0] = (c[0] << 20) | (c[1] << 8) | (c[2] >> 4)
        words[1] = (c[2] << 28) | (c[3] << 16) | (c[4] << 4) | (c[5] >> 8)
        words[2] = (c[5] << 24) | (c[6] << 12) | c[7]
        write_words(data, row, octet, words)

    return {"e2m1": write_e2m1, "e5m6": write_e5m6}.get(fmt, write_cast)
