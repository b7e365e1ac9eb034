"""One thread for each token compares every id with the earlier ones."""

import tilelang.language as T

THREADS = 64
IN_REGISTERS = 16


def build(num_topk: int):
    tokens = T.dynamic("tokens")
    held = num_topk <= IN_REGISTERS

    @T.prim_func
    def inplace_unique_group_indices(ids: T.Tensor((tokens, num_topk), "int64"), num_groups: T.int64):
        with T.Kernel(T.ceildiv(tokens, THREADS), threads=THREADS) as block:
            token = block * THREADS + T.get_thread_binding()
            row = T.alloc_local((num_topk if held else 1,), "int64")
            drop = T.alloc_local((1,), "int32")
            if token < tokens:
                if held:
                    for k in T.unroll(num_topk):
                        row[k] = ids[token, k]
                    for k in T.unroll(num_topk):
                        drop[0] = T.cast(row[k] >= num_groups, "int32")
                        for j in T.unroll(k):
                            if row[k] >= T.int64(0) and row[j] == row[k]:
                                drop[0] = 1
                        if drop[0] != 0:
                            ids[token, k] = T.int64(-1)
                else:
                    # An id that was dropped has an equal one before it, or is none of a group: what is left decides.
                    for k in T.serial(num_topk):
                        row[0] = ids[token, k]
                        drop[0] = T.cast(row[0] >= num_groups, "int32")
                        for j in T.serial(k):
                            if row[0] >= T.int64(0) and ids[token, j] == row[0]:
                                drop[0] = 1
                        if drop[0] != 0:
                            ids[token, k] = T.int64(-1)

    return inplace_unique_group_indices
