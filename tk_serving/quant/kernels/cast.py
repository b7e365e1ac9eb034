"""Element-wise cast of a flat array, eight elements at a time."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, view
from tk_serving.quant.rand import GOLDEN, MULTIPLIERS

THREADS = 256
STEPS = 4  # octets of a thread


def _mix(x):
    """One round of the hash, as an expression on uint32."""
    x = (x ^ (x >> T.uint32(16))) * T.uint32(MULTIPLIERS[0])
    x = (x ^ (x >> T.uint32(15))) * T.uint32(MULTIPLIERS[1])
    return x ^ (x >> T.uint32(16))


def build(x, out, stochastic, aligned):
    """``x`` and ``out``: names of the types; ``aligned``: both arrays start on 16 bytes."""
    n = T.dynamic("n", "int64")
    piece = 16 // (4 if x == "float32" else 2)

    @T.macro
    def random_of(state, element, random):
        random[0] = T.cast(element ^ state[0], "uint32")
        random[0] = _mix(random[0])
        random[0] = random[0] + (
            T.cast(state[0] >> 32, "uint32") ^ (T.cast(element >> 32, "uint32") * T.uint32(GOLDEN))
        )
        random[0] = _mix(random[0])

    @T.macro
    def step_up(value, random):
        """value[0] becomes one of its two neighbours in the result's type; NaN stays."""
        bits = T.alloc_local((1,), "uint32")
        size = T.alloc_local((1,), "uint32")
        bits[0] = T.reinterpret(value[0], "uint32")
        size[0] = bits[0] & T.uint32(0x7FFFFFFF)
        if size[0] <= T.uint32(0x7F800000):
            if out == "bfloat16":
                size[0] = (size[0] + (random[0] >> T.uint32(16))) & T.uint32(0xFFFF0000)
            else:
                if size[0] >= T.uint32(121 << 23):
                    size[0] = (size[0] + (random[0] >> T.uint32(12))) & T.uint32(0xFFF00000)
                else:
                    # Below the normal numbers codes are 2^-9 apart.
                    steps = T.alloc_local((1,), "float32")
                    whole = T.alloc_local((1,), "float32")
                    steps[0] = T.reinterpret(size[0], "float32") * T.float32(512.0)
                    whole[0] = T.floor(steps[0])
                    if T.cast(random[0] >> T.uint32(8), "float32") * T.float32(2.0**-24) < steps[0] - whole[0]:
                        whole[0] = whole[0] + T.float32(1.0)
                    size[0] = T.reinterpret(whole[0] * T.float32(2.0**-9), "uint32")
            value[0] = T.reinterpret(size[0] | (bits[0] & T.uint32(0x80000000)), "float32")

    @T.prim_func
    def cast(values: T.Tensor((n,), x), state: T.Tensor((1,), "int64"), result: T.Tensor((n,), out)):
        with T.Kernel(T.ceildiv(n, OCTET * THREADS * STEPS), threads=THREADS) as block:
            thread = T.get_thread_binding()
            octet = T.alloc_local((1,), "int64")
            raw = T.alloc_local((STEPS * OCTET,), x)
            codes = T.alloc_local((OCTET,), out)
            value = T.alloc_local((1,), "float32")
            random = T.alloc_local((1,), "uint32")
            octet[0] = T.cast(block, "int64") * (THREADS * STEPS) + thread
            pieces = view(values, (n // piece, piece), x)
            octets = view(result, (n // OCTET, OCTET), out)
            for s in T.unroll(STEPS):
                at = octet[0] + s * THREADS
                if aligned and at < n // OCTET:
                    for j in T.unroll(OCTET // piece):
                        for i in T.vectorized(piece):
                            raw[s * OCTET + j * piece + i] = pieces[0][at * (OCTET // piece) + j, i]
                else:
                    for i in T.unroll(OCTET):
                        if at * OCTET + i < n:
                            raw[s * OCTET + i] = values[at * OCTET + i]
            for s in T.unroll(STEPS):
                at = octet[0] + s * THREADS
                for i in T.unroll(OCTET):
                    if at * OCTET + i < n:
                        value[0] = T.cast(raw[s * OCTET + i], "float32")
                        if stochastic:
                            random_of(state, at * OCTET + i, random)
                            step_up(value, random)
                        codes[i] = T.cast(value[0], out)
                if aligned and at < n // OCTET:
                    for i in T.vectorized(OCTET):
                        octets[0][at, i] = codes[i]
                else:
                    for i in T.unroll(OCTET):
                        if at * OCTET + i < n:
                            result[at * OCTET + i] = codes[i]

    return cast
