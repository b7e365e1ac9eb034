"""A thread for each output column: the products are cheap next to the 64-bit remainder."""

import tilelang.language as T

THREADS = 128


def build(ngram: int, tables: int):
    columns = (ngram - 1) * tables
    layers, tokens = T.dynamic("layers", "int64"), T.dynamic("tokens", "int64")

    @T.prim_func
    def engram_hash(
        ids: T.Tensor((tokens, ngram), "int32"),
        multipliers: T.Tensor((layers, ngram), "int64"),
        vocab_sizes: T.Tensor((layers, ngram - 1, tables), "int32"),
        offsets: T.Tensor((layers, columns), "int32"),
        mask: T.Tensor((tokens,), "uint8"),
        rows: T.Tensor((layers, tokens, columns), "int32"),
        masked: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens * columns, THREADS), layers, threads=THREADS) as (block, layer):
            item = T.cast(block, "int64") * THREADS + T.get_thread_binding()
            token = item // columns
            column = item % columns
            value = T.alloc_local((1,), "uint64")
            row = T.alloc_local((1,), "int64")
            if token < tokens:
                # Unsigned, as signed products may not wrap in C++.
                value[0] = T.uint64(0)
                for i in T.unroll(ngram):
                    if i <= column // tables + 1:
                        identifier = T.cast(T.cast(ids[token, i], "int64"), "uint64")
                        value[0] = value[0] ^ (identifier * T.cast(multipliers[layer, i], "uint64"))
                size = T.cast(vocab_sizes[layer, column // tables, column % tables], "int64")
                row[0] = -1
                if size > 0 and (masked == 0 or mask[token] == 0):
                    row[0] = T.truncmod(T.reinterpret(value[0], "int64"), size)
                    if row[0] < 0:
                        row[0] = row[0] + size
                    row[0] = row[0] + offsets[layer, column]
                rows[layer, token, column] = T.cast(row[0], "int32")

    return engram_hash
