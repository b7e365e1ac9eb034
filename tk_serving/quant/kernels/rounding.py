"""Stochastic rounding on the device, with the random bits of ``tk_serving.quant.rand``."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, octet_writer
from tk_serving.quant.rand import GOLDEN, MULTIPLIERS
from tk_serving.quant.rounding import grid


def _mix(x):
    """One round of the hash, as an expression on uint32."""
    x = (x ^ (x >> T.uint32(16))) * T.uint32(MULTIPLIERS[0])
    x = (x ^ (x >> T.uint32(15))) * T.uint32(MULTIPLIERS[1])
    return x ^ (x >> T.uint32(16))


@T.macro
def seeds_of(state, element, seeds):
    """What the random bits of eight elements share, from the number of the first, an int64 multiple of eight."""
    seeds[0] = T.cast(element ^ state[0], "uint32")
    seeds[1] = T.cast(state[0] >> 32, "uint32") ^ (T.cast(element >> 32, "uint32") * T.uint32(GOLDEN))


@T.macro
def random_bits(seeds, i, random):
    """random[0] = the uint32 of the element i of eight."""
    random[0] = seeds[0] ^ T.uint32(i)
    random[0] = _mix(random[0])
    random[0] = random[0] + seeds[1]
    random[0] = _mix(random[0])


def rounder(target):
    """Macro ``step(value, random)``: value[0] becomes one of its two neighbours in the target; NaN stays."""
    to = grid(target)

    @T.macro
    def step(value, random):
        bits = T.alloc_local((1,), "uint32")
        size = T.alloc_local((1,), "uint32")
        bits[0] = T.reinterpret(value[0], "uint32")
        size[0] = bits[0] & T.uint32(0x7FFFFFFF)
        if to.normal == 0:
            if size[0] <= T.uint32(0x7F800000):
                bits[0] = (bits[0] + (random[0] >> T.uint32(32 - to.cut))) & T.uint32(2**32 - 2**to.cut)
            value[0] = T.reinterpret(bits[0], "float32")
        elif size[0] <= T.uint32(0x7F800000):
            if size[0] >= T.uint32(to.normal):
                size[0] = (size[0] + (random[0] >> T.uint32(32 - to.cut))) & T.uint32(2**32 - 2**to.cut)
            else:
                steps = T.alloc_local((1,), "float32")
                whole = T.alloc_local((1,), "float32")
                steps[0] = T.reinterpret(size[0], "float32") * T.float32(1 / to.step)
                whole[0] = T.floor(steps[0])
                if T.cast(random[0] >> T.uint32(8), "float32") * T.float32(2.0**-24) < steps[0] - whole[0]:
                    whole[0] = whole[0] + T.float32(1.0)
                size[0] = T.reinterpret(whole[0] * T.float32(to.step), "uint32")
            value[0] = T.reinterpret(size[0] | (bits[0] & T.uint32(0x80000000)), "float32")

    return step


def rounding_writer(fmt, aligned, stochastic):
    """``octet_writer`` as a macro ``write(data, row, octet, octets, values, multiplier, state)``, with ``stochastic``
    after stochastic rounding by the number of each element; a row is ``octets`` wide."""
    write_nearest = octet_writer(fmt, aligned)
    step = rounder(fmt) if stochastic else None

    @T.macro
    def write(data, row, octet, octets, values, multiplier, state):
        if stochastic:
            value = T.alloc_local((1,), "float32")
            random = T.alloc_local((1,), "uint32")
            seeds = T.alloc_local((2,), "uint32")
            element = T.alloc_local((1,), "int64")
            element[0] = (T.cast(row, "int64") * octets + octet) * OCTET
            seeds_of(state, element[0], seeds)
            for i in T.unroll(OCTET):
                value[0] = values[i] * multiplier
                random_bits(seeds, i, random)
                step(value, random)
                values[i] = value[0]
            write_nearest(data, row, octet, values, T.float32(1.0))
        else:
            write_nearest(data, row, octet, values, multiplier)

    return write
