"""Packed exponents of weight scales and of their transposes; the block index y is the weight."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import bits_of

SLOTS = 4
THREADS = 256


def build(block_size, wide):
    """The results come as rows of four words, which start on 16 bytes if ``wide``."""
    shapes = [tuple(T.dynamic(f"{name}{s}") for name in ("groups", "rows", "columns")) for s in range(SLOTS)]
    quads = [[T.dynamic(f"quads{s}_{i}") for i in range(2)] for s in range(SLOTS)]

    def scales(s):
        return T.Tensor(shapes[s], "float32")

    def words(s, i):
        return T.Tensor((quads[s][i], 4), "int32")

    @T.macro
    def store(out, place, word):
        """The same word for four neighbours, which lie in one block."""
        if wide:
            four = T.alloc_local((4,), "int32")
            for i in T.unroll(4):
                four[i] = word[0]
            for i in T.vectorized(4):
                out[place, i] = four[i]
        else:
            for i in T.unroll(4):
                out[place, i] = word[0]

    @T.macro
    def pack(sf, sf0, sf1, quad):
        """Quads count through sf0, then through sf1."""
        rows, columns = sf.shape[1], sf.shape[2]
        word = T.alloc_local((1,), "int32")
        at = T.alloc_local((4,), "int64")
        word[0] = 0
        at[0] = quad
        if at[0] < sf0.shape[0]:
            across = rows * (block_size // 4)
            at[1] = at[0] // across // T.ceildiv(columns, 4)
            at[2] = at[0] % across * 4 // block_size
            at[3] = at[0] // across % T.ceildiv(columns, 4) * 4
            for j in T.unroll(4):
                if at[3] + j < columns:
                    word[0] = word[0] | (((bits_of(sf[at[1], at[2], at[3] + j]) >> 23) & 255) << (8 * j))
            store(sf0, at[0], word)
        else:
            at[0] = at[0] - sf0.shape[0]
            if at[0] < sf1.shape[0]:
                down = columns * (block_size // 4)
                at[1] = at[0] // down // T.ceildiv(rows, 4)
                at[2] = at[0] % down * 4 // block_size
                at[3] = at[0] // down % T.ceildiv(rows, 4) * 4
                for j in T.unroll(4):
                    if at[3] + j < rows:
                        word[0] = word[0] | (((bits_of(sf[at[1], at[3] + j, at[2]]) >> 23) & 255) << (8 * j))
                store(sf1, at[0], word)

    @T.prim_func
    def transpose_weight_sf(
        a: scales(0),
        a0: words(0, 0),
        a1: words(0, 1),
        b: scales(1),
        b0: words(1, 0),
        b1: words(1, 1),
        c: scales(2),
        c0: words(2, 0),
        c1: words(2, 1),
        d: scales(3),
        d0: words(3, 0),
        d1: words(3, 1),
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
