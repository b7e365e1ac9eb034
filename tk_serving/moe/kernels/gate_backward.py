"""Gradient of the router gate: one warp for each token, which reads the scores once and writes the row once.

Lane k looks after slot k; every lane holds the gradients of every 32nd group of ``width`` neighbouring experts.
"""

import tilelang.language as T

from tk_serving.moe.kernels.gate import TINY
from tk_serving.moe.kernels.warp import fold_sum

WARPS = 4


def build(num_experts: int, num_topk: int, scoring: str, summed: bool, width: int):
    """``summed``: a gradient of the normalised scores is added; ``width``: experts of a load."""
    rows = (num_experts + 31) // 32

    def expert(j, lane):
        return j // width * (32 * width) + lane * width + j % width

    def owner(id):
        """The lane that holds an expert."""
        return T.shift_right(id, width.bit_length() - 1) & 31

    tokens, sequences = T.dynamic("tokens"), T.dynamic("sequences")

    @T.prim_func
    def gate_backward(
        scores: T.Tensor((tokens, num_experts), "float32"),
        ids: T.Tensor((tokens, num_topk), "int64"),
        weights: T.Tensor((tokens, num_topk), "float32"),
        grad_weights: T.Tensor((tokens, num_topk), "float32"),
        mask: T.Tensor((tokens,), "bool"),
        grad_sum: T.Tensor((sequences, num_experts), "float32"),
        out: T.Tensor((tokens, num_experts), "float32"),
        factor: T.float32,
        length: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens, WARPS), threads=32 * WARPS) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * WARPS + thread // 32
            u = T.alloc_local((rows,), "float32")
            grad = T.alloc_local((rows,), "float32")
            h = T.alloc_local((rows,), "float32")
            id = T.alloc_local((1,), "int32")
            source = T.alloc_local((1,), "int64")
            total = T.alloc_local((1,), "float32")
            weighted = T.alloc_local((1,), "float32")
            slot = T.alloc_local((1,), "float32")
            score = T.alloc_local((1,), "float32")
            other = T.alloc_local((1,), "int32")
            if token < tokens:
                for j in T.unroll(rows):
                    u[j] = 0
                    grad[j] = 0
                for q in T.unroll(rows // width):
                    if expert(q * width, lane) < num_experts:
                        for r in T.vectorized(width):
                            u[q * width + r] = scores[token, expert(q * width, lane) + r]

                # The chosen experts.
                source[0] = T.int64(-1)
                slot[0] = 0
                weighted[0] = 0
                if lane < num_topk:  # no load waits for another
                    source[0] = ids[token, lane]
                    slot[0] = grad_weights[token, lane]
                    weighted[0] = weights[token, lane]
                known = source[0] >= T.int64(0) and source[0] < T.int64(num_experts)
                id[0] = T.if_then_else(known, T.cast(source[0], "int32"), -1)
                slot[0] = T.if_then_else(id[0] >= 0, slot[0], T.float32(0))
                weighted[0] = T.if_then_else(id[0] >= 0, slot[0] * weighted[0], T.float32(0))
                total[0] = 0
                for j in T.unroll(rows):
                    score[0] = T.shfl_sync(u[j], owner(id[0]))
                    total[0] = T.if_then_else(id[0] == expert(j, owner(id[0])), score[0], total[0])
                fold_sum(total)
                fold_sum(weighted)
                slot[0] = (factor * slot[0] - weighted[0]) / (total[0] + T.float32(TINY))
                for k in T.unroll(num_topk):
                    other[0] = T.shfl_sync(id[0], k)
                    total[0] = T.shfl_sync(slot[0], k)
                    for j in T.unroll(rows):
                        if expert(j, lane) == other[0]:
                            grad[j] = grad[j] + total[0]

                # The normalised scores of the sequence.
                if summed:
                    if mask[token]:
                        total[0] = 0
                        weighted[0] = 0
                        for j in T.unroll(rows):
                            h[j] = 0
                            if expert(j, lane) < num_experts:
                                h[j] = grad_sum[T.truncdiv(token, length), expert(j, lane)]
                            total[0] = total[0] + u[j]
                            weighted[0] = weighted[0] + h[j] * u[j]
                        fold_sum(total)
                        fold_sum(weighted)
                        for j in T.unroll(rows):
                            grad[j] = grad[j] + (h[j] - weighted[0] / total[0]) / total[0]

                # The score function.
                if scoring == "softmax":
                    weighted[0] = 0
                    for j in T.unroll(rows):
                        weighted[0] = weighted[0] + grad[j] * u[j]
                    fold_sum(weighted)
                for j in T.unroll(rows):
                    if scoring == "softmax":
                        grad[j] = u[j] * (grad[j] - weighted[0])
                    elif scoring == "sigmoid":
                        grad[j] = grad[j] * (u[j] * (T.float32(1) - u[j]))
                    else:
                        total[0] = -T.call_extern("float32", "expm1f", -u[j] * u[j])
                        # The branch of a division would hold back all that follows.
                        score[0] = T.fast_rcp(T.float32(2) * u[j])
                        grad[j] = T.if_then_else(
                            total[0] == T.float32(0), T.float32(0), grad[j] * (total[0] * score[0])
                        )
                for q in T.unroll(rows // width):
                    if expert(q * width, lane) < num_experts:
                        for r in T.vectorized(width):
                            out[token, expert(q * width, lane) + r] = grad[q * width + r]

    return gate_backward
