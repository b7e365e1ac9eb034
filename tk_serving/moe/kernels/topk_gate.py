"""One warp for each token; every lane holds every 32nd score, and K rounds of a warp-wide maximum pick the experts."""

import tilelang.language as T

from tk_serving.moe.kernels.ranking import TAKEN, best_of_warp, sortable

WARPS = 4


def build(num_experts: int, num_topk: int):
    per_lane = (num_experts + 31) // 32
    tokens = T.dynamic("tokens")

    @T.prim_func
    def topk_gate(scores: T.Tensor((tokens, num_experts), "float32"), ids: T.Tensor((tokens, num_topk), "int64")):
        with T.Kernel(T.ceildiv(tokens, WARPS), threads=32 * WARPS) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * WARPS + thread // 32
            keys = T.alloc_local((per_lane,), "int32")
            best = T.alloc_local((2,), "int32")
            chosen = T.alloc_local((1,), "int32")
            if token < tokens:
                for j in T.unroll(per_lane):
                    keys[j] = TAKEN
                    if j * 32 + lane < num_experts:
                        keys[j] = sortable(scores[token, j * 32 + lane])
                for k in T.unroll(num_topk, unroll_factor=1):
                    best_of_warp(keys, best, per_lane, lambda j: j * 32 + lane)
                    if lane == k % 32:
                        chosen[0] = best[1]
                    if k % 32 == 31 or k == num_topk - 1:
                        if lane <= k % 32:
                            ids[token, k - k % 32 + lane] = T.cast(chosen[0], "int64")

    return topk_gate
