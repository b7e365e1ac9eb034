"""A block takes 32 weights: their partial sums travel to shared memory, many at a time, and a warp adds them in order.

The sums take microseconds, so what counts is how many loads are under way from the first moment: all 132 of a weight
on an H200, which is one partial sum for each multiprocessor.
"""

import tilelang.language as T

COLUMNS = 32
THREADS = 128
ROWS, STAGES = 44, 3  # partial sums of a chunk, chunks under way


def build(wide: bool):
    """``wide``: copy 16 bytes at once; otherwise single elements."""
    partials, elements = T.dynamic("partials", "int64"), T.dynamic("elements", "int64")
    bf16, f32 = "bfloat16", "float32"
    piece = 4 if wide else 1  # elements of one copy
    lanes = COLUMNS // piece
    lines = THREADS // lanes  # rows that the block copies at once

    @T.macro
    def fetch(partial, ring, slot, chunk, left, thread):
        for i in T.unroll(-(-ROWS // lines)):
            row = i * lines + thread // lanes
            if row < ROWS and chunk * ROWS + row < partials:
                T.evaluate(
                    T.call_extern(
                        "handle",
                        f"tl::cp_async_gs<{4 * piece}>",
                        T.address_of(ring[slot, row, thread % lanes * piece]),
                        T.address_of(partial[chunk * ROWS + row, left + thread % lanes * piece]),
                    )
                )

    @T.prim_func
    def grad_w_reduce(
        partial: T.Tensor((partials, elements), f32),
        weight_hidden: T.Tensor((elements,), bf16),
        weight_embed: T.Tensor((elements,), bf16),
        grad_hidden: T.Tensor((elements,), f32),
        grad_embed: T.Tensor((elements,), f32),
    ):
        with T.Kernel(elements // COLUMNS, threads=THREADS) as block:
            thread = T.get_thread_binding()
            left = T.cast(block, "int64") * COLUMNS
            at = left + thread % COLUMNS
            ring = T.alloc_shared((STAGES, ROWS, COLUMNS), f32)
            weights = T.alloc_local((2,), f32)
            grads = T.alloc_local((2,), f32)
            total = T.alloc_local((1,), f32)
            chunks = T.cast(T.ceildiv(partials, ROWS), "int32")
            for ahead in T.unroll(STAGES - 1):
                if ahead < chunks:
                    fetch(partial, ring, ahead, T.int64(ahead), left, thread)
                T.ptx_commit_group()
            total[0] = 0.0
            if thread < COLUMNS:
                weights[0] = T.cast(weight_embed[at], f32)
                weights[1] = T.cast(weight_hidden[at], f32)
                grads[0] = grad_hidden[at]
                grads[1] = grad_embed[at]
            for chunk in T.serial(chunks):
                if chunk + STAGES - 1 < chunks:
                    fetch(
                        partial, ring, (chunk + STAGES - 1) % STAGES, T.cast(chunk + STAGES - 1, "int64"), left, thread
                    )
                T.ptx_commit_group()
                T.ptx_wait_group(STAGES - 1)
                T.sync_threads()
                if thread < COLUMNS:
                    for row in T.unroll(ROWS):
                        if chunk * ROWS + row < partials:
                            total[0] = total[0] + ring[chunk % STAGES, row, thread]
                T.sync_threads()
            if thread < COLUMNS:
                grad_hidden[at] = grads[0] + total[0] * weights[0]
                grad_embed[at] = grads[1] + total[0] * weights[1]

    return grad_w_reduce
