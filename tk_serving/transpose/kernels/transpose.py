"""Tiles through shared memory: 16-byte words in, 16-byte words out; the shared-memory reads transpose.

A tile row is eight words of 16 bytes. Words are swizzled by row, so that neither the rows on the way in nor the columns
on the way out meet in one bank: the word q of row r lies at ``q ^ ((r + r // elements per word) % 8)``.
"""

import tilelang.language as T

WORD = 16
WORDS = 8  # words in a tile row
STEPS = 4  # words that a thread moves: enough bytes in flight to cover the latency of the memory


def build(itemsize: int):
    dtype = {1: "uint8", 2: "int16", 4: "int32"}[itemsize]
    per_word = WORD // itemsize
    columns = WORDS * per_word
    rows = columns if itemsize < 4 else 2 * columns
    threads = rows * WORDS // STEPS
    batch, m, n = (T.dynamic(name, "int64") for name in ("batch", "m", "n"))
    batch_stride, row_stride = (T.dynamic(name, "int64") for name in ("batch_stride", "row_stride"))

    def slot(row, word):
        return row * WORDS + (word ^ ((row + row // per_word) % WORDS))

    @T.prim_func
    def transpose(
        x: T.StridedTensor((batch, m, n), (batch_stride, row_stride, 1), dtype),
        y: T.Tensor((batch, n, m), dtype),
        wide_in: T.int32,
        wide_out: T.int32,
    ):
        with T.Kernel(batch * T.ceildiv(m, rows) * T.ceildiv(n, columns), threads=threads) as block:
            thread = T.get_thread_binding()
            # 32-bit division: a grid has fewer than 2^31 blocks.
            tiles_m = T.cast(T.ceildiv(m, rows), "int32")
            tiles_n = T.cast(T.ceildiv(n, columns), "int32")
            position = T.alloc_local((3,), "int32")
            position[0] = T.cast(block, "int32") // (tiles_m * tiles_n)
            position[1] = T.cast(block, "int32") // tiles_n % tiles_m
            position[2] = T.cast(block, "int32") % tiles_n
            b = T.cast(position[0], "int64")
            top = T.cast(position[1], "int64") * rows
            left = T.cast(position[2], "int64") * columns

            tile = T.alloc_shared((rows * columns,), dtype)
            tile_words = T.Tensor((rows * WORDS,), "int32x4", data=tile.data, scope="shared.dyn")
            x_words = T.Tensor(((batch * batch_stride + m * row_stride + n) // per_word,), "int32x4", data=x.data)
            y_words = T.Tensor((batch * n * m // per_word,), "int32x4", data=y.data)
            words = T.alloc_local((STEPS,), "int32x4")
            column = T.alloc_local((per_word,), dtype)
            column_word = T.Tensor((1,), "int32x4", data=column.data, scope="local")

            if wide_in != 0:
                for i in T.unroll(STEPS):
                    row = (i * threads + thread) // WORDS
                    word = thread % WORDS
                    if top + row < m and left + word * per_word < n:
                        words[i] = x_words[(b * batch_stride + (top + row) * row_stride + left) // per_word + word]
                for i in T.unroll(STEPS):
                    tile_words[slot((i * threads + thread) // WORDS, thread % WORDS)] = words[i]
            else:
                for i in T.serial(STEPS * per_word):
                    row = (i * threads + thread) // columns
                    c = (i * threads + thread) % columns
                    if top + row < m and left + c < n:
                        tile[slot(row, c // per_word) * per_word + c % per_word] = x[b, top + row, left + c]
            T.sync_threads()
            if wide_out != 0:
                for i in T.unroll(STEPS):
                    word = (i * threads + thread) // (WORDS * columns) * WORDS + thread % WORDS
                    c = (i * threads + thread) // WORDS % columns
                    for j in T.unroll(per_word):
                        column[j] = tile[slot(word * per_word + j, c // per_word) * per_word + c % per_word]
                    if left + c < n and top + word * per_word < m:
                        y_words[((b * n + left + c) * m + top) // per_word + word] = column_word[0]
            else:
                for i in T.serial(STEPS * per_word):
                    row = (i * threads + thread) % rows
                    c = (i * threads + thread) // rows
                    if left + c < n and top + row < m:
                        y[b, left + c, top + row] = tile[slot(row, c // per_word) * per_word + c % per_word]

    return transpose
