"""Ordering scores inside a warp: integer keys with the order of the floats, and the best remaining key of a warp.

Integer keys make the rules exact: one comparison ranks NaN with -inf, treats +0 and -0 alike, and leaves one value
below every score for entries that are already taken.
"""

import tilelang.language as T

from tk_serving.moe.kernels.warp import ballot, largest, smallest

TAKEN = -(2**31)
NEGATIVE_INFINITY = 0x807FFFFF - 2**32  # sortable(-inf)


def sortable(score):
    """int32 with the order of a float32 score; NaN as -inf, -0 as +0.

    On bits throughout: the compiler folds ``score == score`` and ``score + 0.0``.
    """
    bits = T.reinterpret(score, "int32")
    magnitude = bits & T.int32(0x7FFFFFFF)
    ordered = T.if_then_else(magnitude == 0, T.int32(0), bits ^ ((bits >> 31) & T.int32(0x7FFFFFFF)))
    return T.if_then_else(magnitude > T.int32(0x7F800000), T.int32(NEGATIVE_INFINITY), ordered)


def score_of(key):
    """The float32 score of a key: the inverse of ``sortable`` but for NaN and -0."""
    return T.reinterpret(key ^ ((key >> 31) & T.int32(0x7FFFFFFF)), "float32")


@T.macro
def best_of_warp(keys, best, lane, rows, width):
    """best = (key, index) of the largest key of a warp, ties to the lower index; the winner is marked as taken.

    ``keys[j]`` of a lane belongs to the index ``width * j + lane``.
    """
    best[0] = keys[0]
    best[1] = lane
    for j in T.unroll(1, rows):
        if keys[j] > best[0]:
            best[0] = keys[j]
            best[1] = j * width + lane
    top = T.alloc_local((1,), "int32")
    top[0] = largest(best[0])
    best[1] = T.if_then_else(best[0] == top[0], best[1], T.int32(0x7FFFFFFF))
    best[0] = top[0]
    best[1] = smallest(best[1])
    for j in T.unroll(rows):
        if j * width + lane == best[1] and lane < width:
            keys[j] = TAKEN


@T.macro
def group_ranks(keys, groups, lane, count, width, summed):
    """groups[j] = key of group j: its largest score, or the float32 sum of its two largest where ``summed`` is 2.

    Group j is ``keys[j]`` of the first ``width`` lanes; the other lanes hold TAKEN.
    """
    top = T.alloc_local((1,), "int32")
    winner = T.alloc_local((1,), "int32")
    second = T.alloc_local((1,), "int32")
    for j in T.unroll(count):
        top[0] = largest(keys[j])
        groups[j] = top[0]
        if summed == 2:
            winner[0] = smallest(T.if_then_else(keys[j] == top[0], lane, T.int32(32)))
            second[0] = largest(T.if_then_else(lane == winner[0], T.int32(TAKEN), keys[j]))
            groups[j] = sortable(score_of(top[0]) + score_of(second[0]))


@T.macro
def place_of_group(groups, place, lane, count):
    """place[0] = number of groups that come before group ``lane``: those of a larger key, ties to the lower group."""
    own = T.alloc_local((1,), "int32")
    own[0] = TAKEN
    for j in T.unroll(count):
        if lane == j:
            own[0] = groups[j]
    place[0] = 0
    for j in T.unroll(count):
        if groups[j] > own[0] or (groups[j] == own[0] and j < lane):
            place[0] = place[0] + 1


@T.macro
def keep_best_groups(keys, lane, count, width, num_kept):
    """Mark every key as taken whose group is not among the best by the sum of the two largest scores."""
    groups = T.alloc_local((count,), "int32")
    place = T.alloc_local((1,), "int32")
    kept = T.alloc_local((1,), "uint32")
    group_ranks(keys, groups, lane, count, width, 2)
    place_of_group(groups, place, lane, count)
    kept[0] = ballot(lane < count and place[0] < num_kept)
    for j in T.unroll(count):
        if (kept[0] >> T.uint32(j)) & T.uint32(1) == T.uint32(0):
            keys[j] = TAKEN
