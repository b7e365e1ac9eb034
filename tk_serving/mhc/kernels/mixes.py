"""What becomes of a token's raw mixes: gates, and the doubly stochastic combination (Sinkhorn).

Sinkhorn runs on 16 consecutive lanes, one for each entry of the row-major 4 x 4 matrix, so that a step is two shuffles
and one division.
"""

import tilelang.language as T

MULT = 4
MIXES = MULT * (2 + MULT)


def sigmoid(z):
    return T.float32(1.0) / (T.float32(1.0) + T.exp(-z))


def quotient(a, b):
    """a / b up to two units in the last place: a short chain, and these divisions follow one another."""
    return T.call_extern("float32", "__fdividef", a, b)


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
def sinkhorn(p, repeat, eps):
    """p[0] of each of 16 lanes = its entry of the normalised matrix. All 32 lanes of the warp take part."""
    total = T.alloc_local((1,), "float32")
    row_softmax(p)
    p[0] = p[0] + eps
    column_sum(p, total)
    p[0] = quotient(p[0], total[0] + eps)
    for _ in T.serial(repeat - 1):
        row_sum(p, total)
        p[0] = quotient(p[0], total[0] + eps)
        column_sum(p, total)
        p[0] = quotient(p[0], total[0] + eps)
