"""One warp for each token: the lanes share out the experts of a group, then every lane ranks one group."""

import tilelang.language as T

from tk_serving.moe.kernels.ranking import TAKEN, finite, key_of_group, place_of_group, sortable

WARPS = 4


def build(num_groups: int, group_size: int, num_topk_sum: int, num_topk_groups: int):
    tokens = T.dynamic("tokens")

    @T.prim_func
    def topk_sum_and_topk_group_idx(
        scores: T.Tensor((tokens, num_groups, group_size), "float32"),
        ids: T.Tensor((tokens, num_topk_groups), "int64"),
    ):
        with T.Kernel(T.ceildiv(tokens, WARPS), threads=32 * WARPS) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * WARPS + thread // 32
            key = T.alloc_local((1,), "int32")
            best = T.alloc_local((2,), "int32")
            groups = T.alloc_local((num_groups,), "int32")
            place = T.alloc_local((1,), "int32")
            if token < tokens:
                for g in T.unroll(num_groups):
                    best[0] = TAKEN
                    best[1] = TAKEN
                    for i in T.serial((group_size + 31) // 32):
                        if i * 32 + lane < group_size:
                            key[0] = sortable(finite(scores[token, g, i * 32 + lane]))
                            best[1] = T.max(best[1], T.min(best[0], key[0]))
                            best[0] = T.max(best[0], key[0])
                    key_of_group(best[0], best[1], groups, g, num_topk_sum)
                place_of_group(groups, place, lane, num_groups)
                if lane < num_groups and place[0] < num_topk_groups:
                    ids[token, place[0]] = T.cast(lane, "int64")

    return topk_sum_and_topk_group_idx
