"""Ordering scores inside a warp: integer keys with the order of the floats, and the best remaining key of a warp.

Integer keys make the rules exact: one comparison ranks NaN with -inf, treats +0 and -0 alike, and leaves one value
below every score for entries that are already taken.
"""

import tilelang.language as T

from tk_serving.moe.kernels.warp import ballot, largest, smallest

TAKEN = -(2**31)
NEGATIVE_INFINITY = 0x807FFFFF - 2**32  # sortable(-inf)
LARGEST = 3.4028234663852886e38


def sortable(score):
    """int32 with the order of a float32 score; NaN as -inf, -0 as +0.

    On bits throughout: the compiler folds ``score == score`` and ``score + 0.0``.
    """
    bits = T.reinterpret(score, "int32")
    magnitude = bits & T.int32(0x7FFFFFFF)
    ordered = T.if_then_else(magnitude == 0, T.int32(0), bits ^ ((bits >> 31) & T.int32(0x7FFFFFFF)))
    return T.if_then_else(magnitude > T.int32(0x7F800000), T.int32(NEGATIVE_INFINITY), ordered)


def finite(score):
    """The score limited to finite values; NaN becomes the lowest. On bits: min and max lose NaN."""
    magnitude = T.reinterpret(score, "int32") & T.int32(0x7FFFFFFF)
    limited = T.max(T.min(score, T.float32(LARGEST)), T.float32(-LARGEST))
    return T.if_then_else(magnitude > T.int32(0x7F800000), T.float32(-LARGEST), limited)


def score_of(key):
    """The float32 score of a key: the inverse of ``sortable`` but for NaN and -0."""
    return T.reinterpret(key ^ ((key >> 31) & T.int32(0x7FFFFFFF)), "float32")


def largest_of(keys, rows):
    """The largest of the keys of a lane, as a tree: its depth is what a round waits for."""
    level = [keys[j] for j in range(rows)]
    while len(level) > 1:
        level = [T.max(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


@T.macro
def best_of_warp(keys, best, lane, rows, width):
    """best = (key, index) of the largest key of a warp, ties to the lower index; the winner is marked as taken.

    ``keys[j]`` of a lane belongs to the index ``width * j + lane``.
    """
    own = T.alloc_local((1,), "int32")
    own[0] = largest_of(keys, rows)
    best[0] = largest(own[0])
    best[1] = lane
    for j in T.unroll(rows - 1):
        if keys[rows - 1 - j] == own[0]:
            best[1] = (rows - 1 - j) * width + lane
    if keys[0] == own[0]:
        best[1] = lane
    best[1] = smallest(T.if_then_else(own[0] == best[0], best[1], T.int32(0x7FFFFFFF)))
    for j in T.unroll(rows):
        if j * width + lane == best[1] and lane < width:
            keys[j] = TAKEN


@T.macro
def key_of_group(first, second, groups, at, num_summed):
    """groups[at] = key of a group: that of its largest score, or of the float32 sum of its two largest scores.

    ``first`` and ``second`` are the two largest keys that the lane holds of the group, or TAKEN.
    """
    top = T.alloc_local((1,), "int32")
    winners = T.alloc_local((1,), "uint32")
    runner_up = T.alloc_local((1,), "int32")
    top[0] = largest(first)
    if num_summed == 1:
        groups[at] = top[0]
    else:
        winners[0] = ballot(first == top[0])
        runner_up[0] = largest(T.if_then_else(first == top[0], second, first))
        if (winners[0] & (winners[0] - T.uint32(1))) != T.uint32(0):
            runner_up[0] = top[0]  # as several lanes hold the largest key
        groups[at] = sortable(score_of(top[0]) + score_of(runner_up[0]))


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
def keep_best_groups(keys, lane, count, num_kept):
    """Mark every key as taken whose group is not among the best by the sum of the two largest scores.

    Group j is ``keys[j]`` of all lanes.
    """
    groups = T.alloc_local((count,), "int32")
    place = T.alloc_local((1,), "int32")
    kept = T.alloc_local((1,), "uint32")
    for j in T.unroll(count):
        key_of_group(keys[j], T.int32(TAKEN), groups, j, 2)
    place_of_group(groups, place, lane, count)
    kept[0] = ballot(lane < count and place[0] < num_kept)
    for j in T.unroll(count):
        if (kept[0] >> T.uint32(j)) & T.uint32(1) == T.uint32(0):
            keys[j] = TAKEN
