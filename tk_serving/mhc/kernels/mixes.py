"""What becomes of a token's raw mixes: gates, and the doubly stochastic combination (Sinkhorn).

Sinkhorn runs in one thread for each matrix, which is done soonest, or on 16 consecutive lanes, one for each entry,
which keeps many matrices moving. Both add in the same order.
"""

import tilelang.language as T

MULT = 4
MIXES = MULT * (2 + MULT)


def sigmoid(z):
    return T.float32(1.0) / (T.float32(1.0) + T.exp(-z))


def reciprocal(a):
    """1 / a up to two units in the last place: a short chain, and these divisions follow one another."""
    return T.call_extern("float32", "__fdividef", T.float32(1.0), a)


def inverse_rms(square_sum, size, eps):
    return T.float32(1.0) / T.sqrt(square_sum / size + eps)


def scale_index(column):
    """Which of the three scales a column takes: pre, post or combination."""
    return T.min(column // MULT, 2)


def activate(column, z, pre_eps, post_mult):
    """The mix of a column: sigma(z) + eps (pre), sigma(z) times a factor (post), z itself (combination)."""
    gated = T.if_then_else(column < MULT, sigmoid(z) + pre_eps, sigmoid(z) * post_mult)
    return T.if_then_else(column < 2 * MULT, gated, z)


@T.macro
def row_sum(p, total):
    """total[0] = the sum of p[0] over a row: four neighbouring lanes."""
    total[0] = p[0] + T.shfl_xor(p[0], 1)
    total[0] = total[0] + T.shfl_xor(total[0], 2)


@T.macro
def column_sum(p, total):
    """total[0] = the sum of p[0] over a column: lanes four apart."""
    total[0] = p[0] + T.shfl_xor(p[0], 4)
    total[0] = total[0] + T.shfl_xor(total[0], 8)


@T.macro
def row_softmax(p):
    total = T.alloc_local((1,), "float32")
    total[0] = T.max(p[0], T.shfl_xor(p[0], 1))
    total[0] = T.max(total[0], T.shfl_xor(total[0], 2))
    p[0] = T.exp(p[0] - total[0])
    row_sum(p, total)
    p[0] = p[0] / total[0]


@T.macro
def sinkhorn_of_lanes(p, repeat, eps):
    """p[0] of each of 16 lanes = its entry of the normalised matrix. All 32 lanes of the warp take part."""
    total = T.alloc_local((1,), "float32")
    total[0] = T.max(p[0], T.shfl_xor(p[0], 1))
    total[0] = T.max(total[0], T.shfl_xor(total[0], 2))
    p[0] = T.exp(p[0] - total[0])
    row_sum(p, total)
    p[0] = p[0] * reciprocal(total[0]) + eps
    column_sum(p, total)
    p[0] = p[0] * reciprocal(total[0] + eps)
    for _ in T.serial(repeat - 1):
        row_sum(p, total)
        p[0] = p[0] * reciprocal(total[0] + eps)
        column_sum(p, total)
        p[0] = p[0] * reciprocal(total[0] + eps)


@T.macro
def divide_columns(p, eps):
    """p of one thread over its column sums + eps."""
    total = T.alloc_local((1,), "float32")
    for j in T.unroll(MULT):
        total[0] = reciprocal((p[j] + p[4 + j]) + (p[8 + j] + p[12 + j]) + eps)
        for i in T.unroll(MULT):
            p[4 * i + j] = p[4 * i + j] * total[0]


@T.macro
def sinkhorn(p, repeat, eps):
    """The row-major 4 x 4 matrix p of one thread, normalised: no step waits for another thread. Same bits."""
    total = T.alloc_local((1,), "float32")
    for i in T.unroll(MULT):
        total[0] = T.max(T.max(p[4 * i], p[4 * i + 1]), T.max(p[4 * i + 2], p[4 * i + 3]))
        for j in T.unroll(MULT):
            p[4 * i + j] = T.exp(p[4 * i + j] - total[0])
        total[0] = reciprocal((p[4 * i] + p[4 * i + 1]) + (p[4 * i + 2] + p[4 * i + 3]))
        for j in T.unroll(MULT):
            p[4 * i + j] = p[4 * i + j] * total[0] + eps
    divide_columns(p, eps)
    for _ in T.serial(repeat - 1):
        for i in T.unroll(MULT):
            total[0] = reciprocal((p[4 * i] + p[4 * i + 1]) + (p[4 * i + 2] + p[4 * i + 3]) + eps)
            for j in T.unroll(MULT):
                p[4 * i + j] = p[4 * i + j] * total[0]
        divide_columns(p, eps)
