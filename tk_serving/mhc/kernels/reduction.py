"""Sums over a block in an order that depends on its size alone."""

import tilelang.language as T


@T.macro
def warp_sum(values, number):
    """values[i] of every lane = the sum over the warp, added at lane distances 16, 8, 4, 2, 1."""
    for i in T.unroll(number):
        for step in T.unroll(5):
            values[i] = values[i] + T.shfl_xor(values[i], 16 >> step)


@T.macro
def block_sums(values, number, shared, thread, warps):
    """shared[0, i] = the sum of values[i] over the block; every thread may read it afterwards.

    ``shared`` is float32 [warps, number]; warps are added in ascending order.
    """
    warp_sum(values, number)
    if thread % 32 == 0:
        for i in T.unroll(number):
            shared[thread // 32, i] = values[i]
    T.sync_threads()
    if thread < number:
        for w in T.unroll(1, warps):
            shared[0, thread] = shared[0, thread] + shared[w, thread]
    T.sync_threads()
