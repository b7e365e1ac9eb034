"""Packed exponents of weight scales and of their transposes; the block index y is the weight."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import bits_of

SLOTS = 4
THREADS = 256


def build(block_size, wide):
    """``wide``: the results start on 16 bytes."""
    groups = [T.dynamic(f"groups{s}") for s in range(SLOTS)]
    rows = [T.dynamic(f"rows{s}") for s in range(SLOTS)]
    columns = [T.dynamic(f"columns{s}") for s in range(SLOTS)]

    def scales(s):
        return T.Tensor((groups[s], rows[s], columns[s]), "float32")

    def by_row(s):
        return T.Tensor((groups[s], T.ceildiv(columns[s], 4), rows[s] * block_size), "int32")

    def by_column(s):
        return T.Tensor((groups[s], T.ceildiv(rows[s], 4), columns[s] * block_size), "int32")

    @T.macro
    def store(out, place, word):
        """The same word for four neighbours, which lie in one block."""
        quads = T.Tensor((out.shape[0] * out.shape[1] * (out.shape[2] // 4), 4), "int32", out.data)
        if wide:
            four = T.alloc_local((4,), "int32")
            for i in T.unroll(4):
                four[i] = word[0]
            for i in T.vectorized(4):
                quads[place, i] = four[i]
        else:
            for i in T.unroll(4):
                quads[place, i] = word[0]

    @T.macro
    def pack(sf, sf0, sf1, first):
        """Quads of words count through sf0, then through sf1."""
        word = T.alloc_local((1,), "int32")
        at = T.alloc_local((4,), "int64")
        word[0] = 0
        across, down = sf0.shape[2] // 4, sf1.shape[2] // 4
        count = sf0.shape[0] * sf0.shape[1] * across
        if first < count:
            at[0] = first % across * 4 // block_size
            at[1] = first // across % sf0.shape[1] * 4
            at[2] = first // across // sf0.shape[1]
            for j in T.unroll(4):
                if at[1] + j < sf.shape[2]:
                    word[0] = word[0] | (((bits_of(sf[at[2], at[0], at[1] + j]) >> 23) & 255) << (8 * j))
            store(sf0, first, word)
        else:
            at[3] = first - count
            if at[3] < sf1.shape[0] * sf1.shape[1] * down:
                at[0] = at[3] % down * 4 // block_size
                at[1] = at[3] // down % sf1.shape[1] * 4
                at[2] = at[3] // down // sf1.shape[1]
                for j in T.unroll(4):
                    if at[1] + j < sf.shape[1]:
                        word[0] = word[0] | (((bits_of(sf[at[2], at[1] + j, at[0]]) >> 23) & 255) << (8 * j))
                store(sf1, at[3], word)

    @T.prim_func
    def transpose_weight_sf(
        a: scales(0),
        a0: by_row(0),
        a1: by_column(0),
        b: scales(1),
        b0: by_row(1),
        b1: by_column(1),
        c: scales(2),
        c0: by_row(2),
        c1: by_column(2),
        d: scales(3),
        d0: by_row(3),
        d1: by_column(3),
        weights: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, weights, threads=THREADS) as (bx, by):
            first = T.alloc_local((1,), "int64")
            first[0] = T.cast(bx, "int64") * THREADS + T.get_thread_binding()
            if by == 0:
                pack(a, a0, a1, first[0])
            if by == 1:
                pack(b, b0, b1, first[0])
            if by == 2:
                pack(c, c0, c1, first[0])
            if by == 3:
                pack(d, d0, d1, first[0])

    return transpose_weight_sf
