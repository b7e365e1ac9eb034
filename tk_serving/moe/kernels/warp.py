"""Votes, shuffles and folds of one warp, all 32 lanes taking part."""

import tilelang.language as T

FULL = 0xFFFFFFFF


def ballot(condition):
    """uint32 with the bit of every lane whose condition holds."""
    return T.call_extern("uint32", "__ballot_sync", T.uint32(FULL), T.cast(condition, "int32"))


def popcount(bits):
    return T.call_extern("int32", "__popc", bits)


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
