"""Sums over a row that a block shares, in the order of ``tk_serving.quant.sums``."""

import tilelang.language as T


def octet_sum(values, at):
    """Sum of eight values by adding neighbours."""
    terms = [values[at + i] for i in range(8)]
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=True)]
    return terms[0]


@T.macro
def sum_of_row(total, shared, thread, warps, turn=0):
    """total[0] becomes the sum over the threads of the block, a warp at a time.

    ``shared``: float32 [warps]; before it is used again a barrier must follow. A caller that alternates ``turn`` has
    float32 [2 * warps] and needs none: a thread reaches a half again only after the barrier of the other one.
    """
    for step in T.unroll(5):
        total[0] = total[0] + T.shfl_xor(total[0], 1 << step)
    if warps > 1:
        if thread % 32 == 0:
            shared[turn * warps + thread // 32] = total[0]
        T.sync_threads()
        total[0] = shared[turn * warps]
        for w in T.unroll(warps - 1):
            total[0] = total[0] + shared[turn * warps + w + 1]
