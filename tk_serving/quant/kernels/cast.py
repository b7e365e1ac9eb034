"""Element-wise cast of a flat array, eight elements at a time."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, view
from tk_serving.quant.kernels.rounding import random_bits, rounder, seeds_of

THREADS = 256


def build(x, out, stochastic, aligned):
    """``x`` and ``out``: names of the types; ``aligned``: both arrays start on 16 bytes."""
    n = T.dynamic("n", "int64")
    piece = 16 // (4 if x == "float32" else 2)
    step = rounder("e4m3" if out == "float8_e4m3fn" else out)

    @T.prim_func
    def cast(values: T.Tensor((n,), x), state: T.Tensor((1,), "int64"), result: T.Tensor((n,), out)):
        with T.Kernel(T.ceildiv(n, OCTET * THREADS), threads=THREADS) as block:
            thread = T.get_thread_binding()
            octet = T.alloc_local((1,), "int64")
            raw = T.alloc_local((OCTET,), x)
            codes = T.alloc_local((OCTET,), out)
            value = T.alloc_local((1,), "float32")
            seeds = T.alloc_local((2,), "uint32")
            random = T.alloc_local((1,), "uint32")
            octet[0] = T.cast(block, "int64") * THREADS + thread
            pieces = view(values, (n // piece, piece), x)
            octets = view(result, (n // OCTET, OCTET), out)
            if aligned and octet[0] < n // OCTET:
                for j in T.unroll(OCTET // piece):
                    for i in T.vectorized(piece):
                        raw[j * piece + i] = pieces[0][octet[0] * (OCTET // piece) + j, i]
            else:
                for i in T.unroll(OCTET):
                    raw[i] = T.cast(0, x)
                    if octet[0] * OCTET + i < n:
                        raw[i] = values[octet[0] * OCTET + i]
            if stochastic:
                seeds_of(state, octet[0] * OCTET, seeds)
            for i in T.unroll(OCTET):
                value[0] = T.cast(raw[i], "float32")
                if stochastic:
                    random_bits(seeds, i, random)
                    step(value, random)
                codes[i] = T.cast(value[0], out)
            if aligned and octet[0] < n // OCTET:
                for i in T.vectorized(OCTET):
                    octets[0][octet[0], i] = codes[i]
            else:
                for i in T.unroll(OCTET):
                    if octet[0] * OCTET + i < n:
                        result[octet[0] * OCTET + i] = codes[i]

    return cast
