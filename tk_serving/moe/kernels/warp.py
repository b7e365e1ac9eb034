"""Votes, shuffles, folds and sums over one warp, all 32 lanes taking part, or over all warps of a block."""

import tilelang.language as T

FULL = 0xFFFFFFFF


def ballot(condition):
    """uint32 with the bit of every lane whose condition holds."""
    return T.call_extern("uint32", "__ballot_sync", T.uint32(FULL), T.cast(condition, "int32"))


def popcount(bits):
    return T.call_extern("int32", "__popc", bits)


def below(lane):
    """The bits of the lanes below this one."""
    return (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)


def largest(key):
    """The largest int32 key of the warp."""
    return T.call_extern("int32", "__reduce_max_sync", T.uint32(FULL), key)


def smallest(key):
    return T.call_extern("int32", "__reduce_min_sync", T.uint32(FULL), key)


@T.macro
def fold_sum(value):
    """value[0] becomes the sum over the warp, added in the order of lane distances 16, 8, 4, 2, 1."""
    for step in T.unroll(5):
        value[0] = value[0] + T.shfl_xor(value[0], 16 >> step)


@T.macro
def fold_max(value):
    for step in T.unroll(5):
        value[0] = T.max(value[0], T.shfl_xor(value[0], 16 >> step))


@T.macro
def exclusive_scan(value, warp_sums, thread, warps):
    """value[0] becomes the sum of the values of all earlier threads of the block; value[1] the sum of all.

    ``warp_sums``: shared memory, an int32 for each of the block's ``warps``.
    """
    lane = thread % 32
    sums = T.alloc_local((2,), "int32")
    sums[0] = value[0]
    for step in T.unroll(5):
        sums[1] = T.shfl_up(sums[0], 1 << step)
        if lane >= 1 << step:
            sums[0] = sums[0] + sums[1]
    if lane == 31:
        warp_sums[thread // 32] = sums[0]
    T.sync_threads()
    value[0] = sums[0] - value[0]
    value[1] = 0
    for w in T.unroll(warps):
        if w < thread // 32:
            value[0] = value[0] + warp_sums[w]
        value[1] = value[1] + warp_sums[w]
