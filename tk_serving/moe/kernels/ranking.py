"""Ordering scores inside a warp: integer keys with the order of the floats, and the best remaining key of a warp.

Integer keys make the rules exact: one comparison ranks NaN with -inf, treats +0 and -0 alike, and leaves one value
below every score for entries that are already taken. Comparisons and selections run at half the rate of other
instructions and bound these kernels where tokens are many, so the code counts them.
"""

import tilelang.language as T

from tk_serving.moe.kernels.warp import ballot, largest, smallest

TAKEN = -(2**31)
LARGEST = 3.4028234663852886e38


def sortable(score):
    """int32 with the order of a float32 score; NaN as -inf, -0 as +0.

    With fmaxf, which drops NaN, and an addition by name: the compiler folds ``score + 0.0``.
    """
    number = T.call_extern("float32", "fmaxf", score, -T.infinity("float32"))
    bits = T.reinterpret(T.call_extern("float32", "__fadd_rn", number, T.float32(0)), "int32")
    return ordered(bits)


def ordered(bits):
    """Negative numbers turned over: int32 with the order of the floats, its own inverse."""
    return bits ^ ((bits >> 31) & T.int32(0x7FFFFFFF))


def finite(score):
    """The score limited to finite values; NaN becomes the lowest."""
    # By name and in this order: fmaxf drops NaN, T.max need not.
    above = T.call_extern("float32", "fmaxf", score, T.float32(-LARGEST))
    return T.call_extern("float32", "fminf", above, T.float32(LARGEST))


def score_of(key):
    """The float32 score of a key: the inverse of ``sortable`` but for NaN and -0."""
    return T.reinterpret(ordered(key), "float32")


def largest_of(keys, rows):
    """The largest of the keys of a lane, as a tree: its depth is what a round waits for."""
    level = [keys[j] for j in range(rows)]
    while len(level) > 1:
        level = [T.max(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


@T.macro
def best_of_warp(keys, best, rows, index):
    """best = (key, index) of the largest key of a warp, ties to the lower index; the winner is marked as taken.

    ``index(j)`` is the index of ``keys[j]``, ascending in j; unused keys are taken from the start.
    """
    own = T.alloc_local((1,), "int32")
    own[0] = largest_of(keys, rows)
    best[0] = largest(own[0])
    best[1] = index(rows - 1)
    for j in T.unroll(rows - 1):
        if keys[rows - 2 - j] == own[0]:
            best[1] = index(rows - 2 - j)
    best[1] = smallest(T.if_then_else(own[0] == best[0], best[1], T.int32(0x7FFFFFFF)))
    for j in T.unroll(rows):
        if index(j) == best[1]:
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
    """place[0] = number of groups that come before group ``lane``: those of a larger key, ties to the lower group.

    Only for lanes below ``count``.
    """
    own = T.alloc_local((1,), "int32")
    own[0] = groups[0]
    for j in T.unroll(count - 1):
        # Not lane == j, from which the compiler makes groups[lane], an array with a variable index.
        if lane > j:
            own[0] = groups[j + 1]
    place[0] = 0
    for j in T.unroll(count):
        if groups[j] > own[0] or (groups[j] == own[0] and j < lane):
            place[0] = place[0] + 1


@T.macro
def best_groups(keys, lane, count, num_kept, kept):
    """kept[i] = the i-th group, in ascending order, of the best by the sum of the two largest scores.

    Group j is ``keys[j]`` of all lanes.
    """
    groups = T.alloc_local((count,), "int32")
    place = T.alloc_local((1,), "int32")
    left = T.alloc_local((1,), "uint32")
    for j in T.unroll(count):
        key_of_group(keys[j], T.int32(TAKEN), groups, j, 2)
    place_of_group(groups, place, lane, count)
    left[0] = ballot(lane < count and place[0] < num_kept)
    for i in T.unroll(num_kept):
        kept[i] = T.call_extern("int32", "__ffs", T.reinterpret(left[0], "int32")) - 1
        left[0] = left[0] & (left[0] - T.uint32(1))
