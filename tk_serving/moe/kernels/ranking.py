"""Ordering scores inside a warp: integer keys with the order of the floats, and the best remaining key of a warp.

Integer keys make the rules exact: one comparison ranks NaN with -inf, treats +0 and -0 alike, and leaves one value
below every score for entries that are already taken.
"""

import tilelang.language as T

TAKEN = -(2**31)
FULL = 0xFFFFFFFF
NEGATIVE_INFINITY = 0x807FFFFF - 2**32  # sortable(-inf)


def sortable(score):
    """int32 with the order of a float32 score; NaN as -inf, -0 as +0.

    On bits throughout: the compiler folds ``score == score`` and ``score + 0.0``.
    """
    bits = T.reinterpret(score, "int32")
    magnitude = bits & T.int32(0x7FFFFFFF)
    ordered = T.if_then_else(magnitude == 0, T.int32(0), bits ^ ((bits >> 31) & T.int32(0x7FFFFFFF)))
    return T.if_then_else(magnitude > T.int32(0x7F800000), T.int32(NEGATIVE_INFINITY), ordered)


@T.macro
def best_of_warp(keys, best, lane, per_lane):
    """best = (key, index) of the largest key of a warp, ties to the lower index; the winner is marked as taken.

    Lane l holds the keys of the indices l, l + 32, ...: ``keys[j]`` belongs to index 32 j + l.
    """
    best[0] = keys[0]
    best[1] = lane
    for j in T.unroll(1, per_lane):
        if keys[j] > best[0]:
            best[0] = keys[j]
            best[1] = j * 32 + lane
    top = T.alloc_local((1,), "int32")
    top[0] = T.call_extern("int32", "__reduce_max_sync", T.uint32(FULL), best[0])
    best[1] = T.if_then_else(best[0] == top[0], best[1], T.int32(0x7FFFFFFF))
    best[0] = top[0]
    best[1] = T.call_extern("int32", "__reduce_min_sync", T.uint32(FULL), best[1])
    for j in T.unroll(per_lane):
        if j * 32 + lane == best[1]:
            keys[j] = TAKEN
