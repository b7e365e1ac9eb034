"""Reading the input of a cast, eight columns at a time, in any of its forms."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, float_of, fmax, value_of_e2m1, value_of_e5m6, view
from tk_serving.quant.kernels.scales import scale_of_exponent


@dataclass(frozen=True)
class Source:
    """How eight columns of a row become float32.

    Attributes:
        dtype: of the tensor.
        columns: elements of the tensor for eight values.
        load: macro ``load(x, row, octet, raw, at)``: the elements into raw[at * columns ...].
        decode: macro ``decode(raw, at, values)``: their float32 values.
        maximum: macro ``maximum(raw, at, most)``: most[0] = the largest magnitude of the eight, NaN ignored.
    """

    dtype: str
    columns: int
    load: Any
    decode: Any
    maximum: Any


SIZES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
"""Bytes of an element."""


def max_of_pairs(a, b):
    """Word of the larger ones of two words of two bfloat16 each; the number where the other is NaN."""
    return T.reinterpret(T.max2(T.reinterpret(a, "bfloat16x2"), T.reinterpret(b, "bfloat16x2")), "int32")


def words_of(raw, dtype):
    """The words of ``raw``: of parts of a word every one would be a register of its own, filled as soon as the word is
    loaded, which waits for one load before the next is issued."""
    return view(raw, (raw.shape[0] * SIZES[dtype] // 4,), "int32", scope="local")


def source(name, aligned):
    """bfloat16, float32 or the codes e4m3, e2m1, e5m6; with ``aligned`` rows start on 16 bytes."""
    dtype, columns = {
        "bfloat16": ("bfloat16", OCTET),
        "float32": ("float32", OCTET),
        "e4m3": ("float8_e4m3fn", OCTET),
        "e2m1": ("int8", OCTET // 2),
        "e5m6": ("uint8", OCTET * 3 // 2),
    }[name]

    size = columns * SIZES[dtype] // 4  # words
    piece = min(size, 4) if size % 2 == 0 else 1  # words of one vector access

    @T.macro
    def load(x, row, octet, raw, at):
        if aligned:
            # The row stride is written as a multiple of the vector, which the compiler cannot know of an argument.
            per_piece = piece * 4 // SIZES[dtype]
            shape = (x.shape[0], x.shape[1] // per_piece, piece)
            pieces = view(x, shape, "int32", (x.strides[0] // per_piece * piece, piece, 1))
            words = words_of(raw, dtype)
            for j in T.unroll(size // piece):
                for i in T.vectorized(piece):
                    words[0][at * size + j * piece + i] = pieces[0][row, octet * (size // piece) + j, i]
        else:
            for i in T.unroll(columns):
                raw[at * columns + i] = x[row, octet * columns + i]

    @T.macro
    def decode_bfloat16(raw, at, values):
        words = words_of(raw, dtype)
        for i in T.unroll(OCTET // 2):
            values[2 * i] = float_of(words[0][at * size + i] << 16)
            values[2 * i + 1] = float_of(words[0][at * size + i] & T.int32(-0x10000))

    @T.macro
    def decode_float32(raw, at, values):
        for i in T.unroll(OCTET):
            values[i] = raw[at * columns + i]

    @T.macro
    def decode_e4m3(raw, at, values):
        words = words_of(raw, dtype)
        codes = T.alloc_local((OCTET,), dtype)
        halves = view(codes, (size,), "int32", scope="local")
        for i in T.unroll(size):
            halves[0][i] = words[0][at * size + i]
        for i in T.vectorized(OCTET):
            values[i] = T.cast(codes[i], "float32")

    @T.macro
    def decode_e2m1(raw, at, values):
        words = words_of(raw, dtype)
        for i in T.unroll(OCTET):
            values[i] = value_of_e2m1((words[0][at] >> (4 * i)) & 15)

    @T.macro
    def decode_e5m6(raw, at, values):
        words = words_of(raw, dtype)
        w = T.alloc_local((size,), "int32")
        for i in T.unroll(size):
            w[i] = words[0][at * size + i]
        values[0] = value_of_e5m6(w[0] >> 20)
        values[1] = value_of_e5m6(w[0] >> 8)
        values[2] = value_of_e5m6((w[0] << 4) | ((w[1] >> 28) & 15))
        values[3] = value_of_e5m6(w[1] >> 16)
        values[4] = value_of_e5m6(w[1] >> 4)
        values[5] = value_of_e5m6((w[1] << 8) | ((w[2] >> 24) & 255))
        values[6] = value_of_e5m6(w[2] >> 12)
        values[7] = value_of_e5m6(w[2])

    @T.macro
    def maximum_bfloat16(raw, at, most):
        """Two at a time."""
        words = words_of(raw, dtype)
        pair = T.alloc_local((1,), "int32")
        pair[0] = words[0][at * size] & T.int32(0x7FFF7FFF)
        for i in T.unroll(OCTET // 2 - 1):
            pair[0] = max_of_pairs(pair[0], words[0][at * size + 1 + i] & T.int32(0x7FFF7FFF))
        most[0] = fmax(fmax(T.float32(0.0), float_of(pair[0] << 16)), float_of(pair[0] & T.int32(-0x10000)))

    decoders = {"bfloat16": decode_bfloat16, "float32": decode_float32, "e4m3": decode_e4m3}
    decode = (decoders | {"e2m1": decode_e2m1, "e5m6": decode_e5m6})[name]

    @T.macro
    def maximum_decoded(raw, at, most):
        values = T.alloc_local((OCTET,), "float32")
        decode(raw, at, values)
        most[0] = T.float32(0.0)
        for i in T.unroll(OCTET):
            most[0] = fmax(most[0], T.abs(values[i]))

    return Source(dtype, columns, load, decode, maximum_bfloat16 if name == "bfloat16" else maximum_decoded)


def block_factor(sf_dtype, block_m, block_k):
    """Macro ``load(sf, row, octet, factors, at)``: the scale of eight columns; 1 where ``sf_dtype`` is None.

    ``block_k`` 0 means the whole row. Places past the edges, which a caller does not use, are kept inside without a
    branch.
    """

    def block_of(octet):
        return octet * OCTET // block_k if block_k else 0

    @T.macro
    def load(sf, row, octet, factors, at):
        if sf_dtype is None:
            factors[at] = T.float32(1.0)
        elif sf_dtype == "int32":
            exponent = T.alloc_local((1,), "int32")  # a variable: used thrice, and slow to compile in place
            word = T.min(block_of(octet) // 4, sf.shape[1] - 1)
            exponent[0] = (sf[T.min(row // block_m, sf.shape[0] - 1), word] >> (8 * (block_of(octet) % 4))) & 255
            factors[at] = scale_of_exponent(exponent[0])
        else:
            place = T.min(block_of(octet), sf.shape[1] - 1)
            factors[at] = T.cast(sf[T.min(row // block_m, sf.shape[0] - 1), place], "float32")

    return load
