"""Histogram of ids: counted in the shared memory of one block, or in chunks and then summed up."""

import tilelang.language as T

THREADS = 256
BATCH = 8  # loads in flight


@T.macro
def read_id(ids, at, end, bins, id, slot):
    """id[slot] = an id; ``bins`` where it is out of range or past the end."""
    wide = T.alloc_local((1,), "int64")
    id[slot] = bins
    if at < end:
        wide[0] = T.cast(ids[at], "int64")
        if wide[0] >= T.int64(0) and wide[0] < T.int64(bins):
            id[slot] = T.cast(wide[0], "int32")


def chunks(bins: int):
    """Counts of each chunk of ids."""
    size, blocks = T.dynamic("size"), T.dynamic("blocks")

    @T.prim_func
    def count_chunks(ids: T.Tensor((size,), "int64"), counts: T.Tensor((blocks, bins), "int32"), chunk: T.int32):
        with T.Kernel(blocks, threads=THREADS) as block:
            thread = T.get_thread_binding()
            total = T.alloc_shared((bins + 1,), "int32")
            id = T.alloc_local((BATCH,), "int32")
            for i in T.serial(T.ceildiv(bins + 1, THREADS)):
                if i * THREADS + thread <= bins:
                    total[i * THREADS + thread] = 0
            T.sync_threads()
            end = T.min(block * chunk + chunk, size)
            for i in T.serial(T.truncdiv(chunk + BATCH * THREADS - 1, BATCH * THREADS)):
                for j in T.unroll(BATCH):
                    read_id(ids, block * chunk + (i * BATCH + j) * THREADS + thread, end, bins, id, j)
                for j in T.unroll(BATCH):
                    if id[j] < bins:
                        T.atomic_add(total[id[j]], 1)
            T.sync_threads()
            for i in T.serial(T.ceildiv(bins, THREADS)):
                if i * THREADS + thread < bins:
                    counts[block, i * THREADS + thread] = total[i * THREADS + thread]

    return count_chunks


def build(bins: int, averaged: bool, counted: bool):
    size, chunks = T.dynamic("size"), T.dynamic("chunks")
    blocks = (bins + THREADS - 1) // THREADS if counted else 1
    dtype = "float32" if averaged else "int32"

    @T.macro
    def store(out, bin, count, divisor):
        if averaged:
            out[bin] = T.cast(T.cast(count, "int64") * T.int64(bins), "float32") / divisor
        else:
            out[bin] = count

    @T.prim_func
    def group_count(
        ids: T.Tensor((size,), "int64"),
        counts: T.Tensor((chunks, bins), "int32"),
        out: T.Tensor((bins,), dtype),
        divisor: T.float32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            thread = T.get_thread_binding()
            value = T.alloc_local((BATCH,), "int32")
            if counted:
                bin = block * THREADS + thread
                count = T.alloc_local((1,), "int32")
                if bin < bins:
                    count[0] = 0
                    for c in T.serial(T.truncdiv(chunks + BATCH - 1, BATCH)):
                        for j in T.unroll(BATCH):
                            value[j] = 0
                            if c * BATCH + j < chunks:
                                value[j] = counts[c * BATCH + j, bin]
                        for j in T.unroll(BATCH):
                            count[0] = count[0] + value[j]
                    store(out, bin, count[0], divisor)
            else:
                total = T.alloc_shared((bins,), "int32")
                for i in T.serial((bins + THREADS - 1) // THREADS):
                    if i * THREADS + thread < bins:
                        total[i * THREADS + thread] = 0
                T.sync_threads()
                for i in T.serial(T.truncdiv(size + BATCH * THREADS - 1, BATCH * THREADS)):
                    for j in T.unroll(BATCH):
                        read_id(ids, (i * BATCH + j) * THREADS + thread, size, bins, value, j)
                    for j in T.unroll(BATCH):
                        if value[j] < bins:
                            T.atomic_add(total[value[j]], 1)
                T.sync_threads()
                for i in T.serial((bins + THREADS - 1) // THREADS):
                    if i * THREADS + thread < bins:
                        store(out, i * THREADS + thread, total[i * THREADS + thread], divisor)

    return group_count
