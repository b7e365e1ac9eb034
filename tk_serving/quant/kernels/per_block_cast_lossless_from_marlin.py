"""FP4 in Marlin's layout to FP8 in rows: a table look-up for each code, and a transposition through shared memory.

A block takes 64 rows (of N) and up to 256 columns (of K), a warp one group of 32 columns at a time: two tiles of 16
columns, 16 bytes of each for a lane. A lane's words hold eight rows. For each row the scale selects one of twenty
tables of the eight magnitudes as e4m3 bytes, eight bytes in shared memory, and a byte permutation looks four codes up
at once.
"""

import tilelang.language as T

from tk_serving.quant.kernels.formats import bits_of, float_of, value_of_e2m1, view

RAISE = 6
SHIFTS = 20  # from 2^6 down to 2^-12; below that every code rounds to zero
WARPS = 4
ROWS = 64
PAD = 4  # words after a row in shared memory: eight rows of four words then lie in different banks
SIGNS = -0x7F7F7F80  # 0x80808080
SIZES = 0x77777777


def permute(a, b, selector):
    """Bytes of the words a (0 ... 3) and b (4 ... 7), chosen by the four low nibbles of ``selector``."""
    return T.call_extern("int32", "__byte_perm", a, b, selector)


@T.macro
def fill(table, thread):
    """Entry s: the magnitudes times 2^(6 - s), eight bytes; the last entry is zero."""
    bytes_of_half = T.alloc_local((4,), "float8_e4m3fn")
    word = view(bytes_of_half, (1,), "int32", scope="local")
    value = T.alloc_local((4,), "float32")
    if thread < 2 * SHIFTS:
        for i in T.unroll(4):
            value[i] = value_of_e2m1(thread % 2 * 4 + i) * float_of((127 + RAISE - thread // 2) << 23)
            if thread // 2 == SHIFTS - 1:
                value[i] = T.float32(0.0)
        for i in T.vectorized(4):
            bytes_of_half[i] = T.cast(value[i], "float8_e4m3fn")
        table[thread // 2, thread % 2] = word[0][0]


def build(n: int, k: int, aligned: bool):
    """Weights of ``n`` rows and ``k`` columns, multiples of 128; with ``aligned`` all tensors start on 16 bytes."""
    span = 256 if k % 256 == 0 else 128
    groups = span // 32 // WARPS
    columns = span // 4  # words of a row
    experts = T.dynamic("experts", "int64")

    @T.macro
    def load(data, sf, e, bn, first, lane, raw, exponents, g):
        """The words of one group of 32 columns, four of each tile, and the exponents of its eight rows."""
        if aligned:
            quads = view(data, (experts, k // 16, n // 2, 4), "int32")
            pairs = view(sf, (experts, k // 32, n // 8, 2), "int32")
            for t in T.unroll(2):
                for i in T.vectorized(4):
                    raw[g * 8 + t * 4 + i] = quads[0][e, first * 2 + t, bn * 32 + lane, i]
            for i in T.vectorized(2):
                exponents[g * 2 + i] = pairs[0][e, first, bn * 8 + lane // 4, i]
        else:
            for t in T.unroll(2):
                for i in T.unroll(4):
                    raw[g * 8 + t * 4 + i] = data[e, first * 2 + t, bn * 128 + lane * 4 + i]
            for i in T.unroll(2):
                exponents[g * 2 + i] = 0
                for j in T.unroll(4):
                    byte = T.cast(sf[e, first, bn * 64 + lane // 4 * 8 + i * 4 + j], "int32")
                    exponents[g * 2 + i] = exponents[g * 2 + i] | (byte << (8 * j))

    @T.macro
    def convert(table, tile, raw, exponents, base, g, group, lane):
        """The codes of one group of columns into the tile."""
        odd = lane % 2
        # Lanes 2 p and 2 p + 1 have columns 4 p, 4 p + 1 and 4 p + 2, 4 p + 3, and eight further: they share.
        mine = T.if_then_else(odd == 0, 0x6420, 0x3175)
        column = group * 8 + lane % 4 // 2 + odd * 2
        look = T.alloc_local((4,), "int32")  # tables of two rows
        at = T.alloc_local((1,), "int32")
        codes = T.alloc_local((1,), "int32")
        shifted = T.alloc_local((1,), "int32")
        word = T.alloc_local((2,), "int32")
        for w in T.unroll(4):
            for h in T.unroll(2):
                at[0] = base[g] - ((exponents[g * 2 + w // 2] >> (8 * (w % 2 + 2 * h))) & 255)
                at[0] = T.max(T.min(at[0], SHIFTS - 1), 0)
                for i in T.vectorized(2):
                    look[h * 2 + i] = table[at[0], i]
            for t in T.unroll(2):
                codes[0] = permute(raw[g * 8 + t * 4 + w], 0, 0x3120)  # four nibbles of a row together
                shifted[0] = codes[0] << 4
                word[0] = permute(look[0], look[1], codes[0] & SIZES)
                word[0] = word[0] | (permute(shifted[0], codes[0], 0x5140) & T.int32(SIGNS))
                word[1] = permute(look[2], look[3], (codes[0] & SIZES) >> 16)
                word[1] = word[1] | (permute(shifted[0], codes[0], 0x7362) & T.int32(SIGNS))
                for h in T.unroll(2):
                    tile[w * 16 + h * 8 + lane // 4, column + t * 4] = permute(word[h], T.shfl_xor(word[h], 1), mine)

    @T.macro
    def store(tile, out, e, bn, bk, thread):
        for step in T.unroll(ROWS * span // 16 // (32 * WARPS)):
            unit = step * 32 * WARPS + thread
            row = unit // (span // 16)
            part = unit % (span // 16)
            if aligned:
                quads = view(out, (experts, n, k // 16, 4), "int32")
                words = T.alloc_local((4,), "int32")
                for i in T.vectorized(4):
                    words[i] = tile[row, part * 4 + i]
                for i in T.vectorized(4):
                    quads[0][e, bn * ROWS + row, bk * (span // 16) + part, i] = words[i]
            else:
                plain = view(out, (experts, n, k), "int8")
                for i in T.unroll(16, unroll_factor=1):
                    byte = tile[row, part * 4 + i // 4] >> (8 * (i % 4))
                    plain[0][e, bn * ROWS + row, bk * span + part * 16 + i] = T.cast(byte, "int8")

    @T.prim_func
    def lossless_from_marlin(
        data: T.Tensor((experts, k // 16, 2 * n), "int32"),
        sf: T.Tensor((experts, k // 32, n), "uint8"),
        out_sf: T.Tensor((experts, n // 128, k // 128), "float32"),
        out: T.Tensor((experts, n, k), "float8_e4m3fn"),
    ):
        with T.Kernel(n // ROWS, k // span, experts, threads=32 * WARPS) as (bn, bk, be):
            thread = T.get_thread_binding()
            lane = thread % 32
            warp = thread // 32
            e = T.cast(be, "int64")
            tile = T.alloc_shared((ROWS, columns + PAD), "int32")
            # In static shared memory: TileLang would guard reads of it against writes to the tile with barriers.
            table = T.alloc_shared((SHIFTS, 2), "int32", scope="shared")
            raw = T.alloc_local((groups * 8,), "int32")
            exponents = T.alloc_local((groups * 2,), "int32")
            base = T.alloc_local((groups,), "int32")
            for g in T.unroll(groups):
                group = bk * (span // 32) + g * WARPS + warp
                load(data, sf, e, bn, group, lane, raw, exponents, g)
                base[g] = RAISE + ((bits_of(out_sf[e, bn // 2, group // 4]) >> 23) & 255)
            fill(table, thread)
            T.sync_threads()
            for g in T.unroll(groups):
                convert(table, tile, raw, exponents, base, g, g * WARPS + warp, lane)
            T.sync_threads()
            store(tile, out, e, bn, bk, thread)

    return lossless_from_marlin
