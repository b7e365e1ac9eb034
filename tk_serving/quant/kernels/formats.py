"""Encoding and decoding of quantised values in registers, eight columns at a time.

Minima and maxima go through ``fminf`` and ``fmaxf``, which return the number where the other operand is NaN.
"""

import tilelang.language as T

from tk_serving.quant.formats import FORMATS

OCTET = 8
"""Columns that a lane reads, converts and writes together: 16 bytes of bfloat16."""

_NO_EXPONENTS = -sum(0x4B000000 << (4 * i) for i in range(OCTET)) & 0x7FFFFFFF
"""Cancels the upper bits of 2^23 + code in the sum of eight of them, each shifted by its nibble."""


def fmin(a, b):
    return T.call_extern("float32", "fminf", a, b)


def fmax(a, b):
    return T.call_extern("float32", "fmaxf", a, b)


def view(tensor, shape, dtype, strides=None, scope="global"):
    """Another shape of a tensor, in a tuple of one.

    TileLang names a parameter after the variable of a view of it, and mixes up the sizes of parameters of one name; it
    leaves tuples alone.
    """
    if strides is None:
        return (T.Tensor(shape, dtype, tensor.data, scope=scope),)
    return (T.Buffer(shape, dtype, tensor.data, strides, scope=scope),)


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
def e2m1_word(values, multiplier, word):
    """word[0] = the codes of eight values, nearest and ties to even, the first in the low nibble; NaN is +6.

    The codes 0 ... 7 count steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6: the code of a magnitude m is
    min(2 m, m + 2, m / 2 + 4), rounded. Each is rounded once by adding 2^23, which leaves an integer in the low bits.
    """
    value = T.alloc_local((1,), "float32")
    size = T.alloc_local((1,), "float32")
    code = T.alloc_local((1,), "float32")
    signs = T.alloc_local((1,), "int32")
    word[0] = T.int32(_NO_EXPONENTS)
    signs[0] = 0
    for i in T.unroll(OCTET):
        value[0] = fmax(fmin(values[i] * multiplier, T.float32(6.0)), T.float32(-6.0))
        size[0] = T.abs(value[0])
        code[0] = T.ieee_fmaf(size[0], T.float32(0.5), T.float32(2.0**23 + 4))
        code[0] = fmin(code[0], size[0] + T.float32(2.0**23 + 2))
        code[0] = fmin(code[0], T.ieee_fmaf(size[0], T.float32(2.0), T.float32(2.0**23)))
        word[0] = word[0] + (bits_of(code[0]) << (4 * i))
        signs[0] = signs[0] | ((bits_of(value[0]) >> (28 - 4 * i)) & (8 << (4 * i)))
    word[0] = word[0] | signs[0]


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
            # One variable times eight: nvcc keeps a vector store only where it sees the alignment of the index.
            octets = view(data, (data.shape[0] * (data.shape[1] // OCTET), OCTET), dtype)
            place = T.alloc_local((1,), "int64")
            place[0] = T.cast(row, "int64") * (data.shape[1] // OCTET) + octet
            for i in T.vectorized(OCTET):
                octets[0][place[0], i] = codes[i]
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
        e2m1_word(values, multiplier, words)
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


def strided_writer(dtype, aligned):
    """Macro ``write(tensor, row, octet, values, at)``: values[8 at ...] of this dtype into a row-strided tensor."""
    piece = 4 if dtype == "float32" else OCTET  # elements of one vector access

    @T.macro
    def write(tensor, row, octet, values, at):
        if aligned:
            pieces = view(tensor, (tensor.shape[0] * (tensor.strides[0] // piece), piece), dtype)
            place = T.alloc_local((1,), "int64")
            place[0] = T.cast(row, "int64") * (tensor.strides[0] // piece) + octet * (OCTET // piece)
            for j in T.unroll(OCTET // piece):
                for i in T.vectorized(piece):
                    pieces[0][place[0] + j, i] = values[at * OCTET + j * piece + i]
        else:
            for i in T.unroll(OCTET):
                tensor[row, octet * OCTET + i] = values[at * OCTET + i]

    return write
