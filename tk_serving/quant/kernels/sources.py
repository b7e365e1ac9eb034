"""Reading the input of a cast, eight columns at a time, in any of its forms."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, value_of_e2m1, value_of_e5m6, view
from tk_serving.quant.kernels.scales import scale_of_exponent


@dataclass(frozen=True)
class Source:
    """How eight columns of a row become float32.

    Attributes:
        dtype: of the tensor.
        columns: elements of the tensor for eight values.
        load: macro ``load(x, row, octet, raw, at)``: the elements into raw[at * columns ...].
        decode: macro ``decode(raw, at, values)``: their float32 values.
    """

    dtype: str
    columns: int
    load: Any
    decode: Any


def source(name, aligned):
    """bfloat16, float32 or the codes e4m3, e2m1, e5m6; with ``aligned`` rows start on 16 bytes."""
    dtype, columns = {
        "bfloat16": ("bfloat16", OCTET),
        "float32": ("float32", OCTET),
        "e4m3": ("float8_e4m3fn", OCTET),
        "e2m1": ("int8", OCTET // 2),
        "e5m6": ("uint8", OCTET * 3 // 2),
    }[name]

    piece = min(columns, 4 if dtype in ("float32", "uint8") else 16)  # elements of one vector access

    @T.macro
    def load(x, row, octet, raw, at):
        if aligned:
            # The row stride is written as a multiple of the vector, which the compiler cannot know of an argument.
            shape, strides = (x.shape[0], x.shape[1] // piece, piece), (x.strides[0] // piece * piece, piece, 1)
            pieces = view(x, shape, dtype, strides)
            for j in T.unroll(columns // piece):
                for i in T.vectorized(piece):
                    raw[at * columns + j * piece + i] = pieces[0][row, octet * (columns // piece) + j, i]
        else:
            for i in T.unroll(columns):
                raw[at * columns + i] = x[row, octet * columns + i]

    @T.macro
    def decode_float(raw, at, values):
        for i in T.vectorized(OCTET):
            values[i] = T.cast(raw[at * OCTET + i], "float32")

    @T.macro
    def decode_e2m1(raw, at, values):
        for i in T.unroll(OCTET):
            values[i] = value_of_e2m1((T.cast(raw[at * columns + i // 2], "int32") >> (4 * (i % 2))) & 15)

    @T.macro
    def decode_e5m6(raw, at, values):
        # Three little-endian words; a byte of the word w is raw[4 w + j].
        words = T.alloc_local((3,), "int32")
        for w in T.unroll(3):
            words[w] = 0
            for j in T.unroll(4):
                words[w] = words[w] | (T.cast(raw[at * columns + w * 4 + j], "int32") << (8 * j))
        values[0] = value_of_e5m6(words[0] >> 20)
        values[1] = value_of_e5m6(words[0] >> 8)
        values[2] = value_of_e5m6((words[0] << 4) | ((words[1] >> 28) & 15))
        values[3] = value_of_e5m6(words[1] >> 16)
        values[4] = value_of_e5m6(words[1] >> 4)
        values[5] = value_of_e5m6((words[1] << 8) | ((words[2] >> 24) & 255))
        values[6] = value_of_e5m6(words[2] >> 12)
        values[7] = value_of_e5m6(words[2])

    decode = {"e2m1": decode_e2m1, "e5m6": decode_e5m6}.get(name, decode_float)
    return Source(dtype, columns, load, decode)


def block_factor(sf_dtype, block_m, block_k):
    """Macro ``load(sf, row, octet, factors, at)``: the scale of eight columns; 1 where ``sf_dtype`` is None.

    ``block_k`` 0 means the whole row.
    """

    def block_of(octet):
        return octet * OCTET // block_k if block_k else 0

    @T.macro
    def load(sf, row, octet, factors, at):
        if sf_dtype is None:
            factors[at] = T.float32(1.0)
        elif sf_dtype == "int32":
            exponent = T.alloc_local((1,), "int32")  # a variable: used thrice, and slow to compile in place
            exponent[0] = (sf[row // block_m, block_of(octet) // 4] >> (8 * (block_of(octet) % 4))) & 255
            factors[at] = scale_of_exponent(exponent[0])
        else:
            factors[at] = T.cast(sf[row // block_m, block_of(octet)], "float32")

    return load
