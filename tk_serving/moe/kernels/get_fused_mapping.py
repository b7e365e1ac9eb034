"""Stable counting sort of expert ids into aligned regions.

A block ranks one chunk of pairs. It needs the number of pairs of every expert, in all and before its chunk: it counts
the ids themselves where they are few, else a first launch counts them by sections of several chunks, which are few
enough to be added up by every block, and by chunk before each chunk of a section. The order within the chunk comes
from the warps taking consecutive parts of it, and from votes inside a warp: no result depends on the number of blocks
or on their schedule.
"""

import tilelang.language as T

from tk_serving.moe.kernels.group_count import BATCH, THREADS, read_id
from tk_serving.moe.kernels.warp import ballot, below, exclusive_scan, popcount

WARPS = THREADS // 32
SECTIONS_AT_ONCE = 16
SECTION = 8  # chunks
COUNTERS = 512  # threads that count a section


def rounded_up(number, multiple):
    return T.truncdiv(number + multiple - 1, multiple) * multiple


def count(num_experts: int, ids_dtype: str):
    """Pairs of every expert in each section, and before each chunk of its section."""
    size, sections, chunks = T.dynamic("size"), T.dynamic("sections"), T.dynamic("chunks")
    shares = COUNTERS // THREADS
    loads = SECTION // shares

    @T.prim_func
    def count_pairs(
        ids: T.Tensor((size,), ids_dtype),
        totals: T.Tensor((sections, num_experts), "int32"),
        before: T.Tensor((chunks, num_experts), "int32"),
        chunk: T.int32,
    ):
        with T.Kernel(sections, threads=COUNTERS) as block:
            thread = T.get_thread_binding()
            found = T.alloc_shared((SECTION, num_experts + 1), "int32")
            id = T.alloc_local((loads,), "int32")
            sum = T.alloc_local((1,), "int32")
            for i in T.serial(T.ceildiv(num_experts + 1, COUNTERS)):
                if i * COUNTERS + thread <= num_experts:
                    for c in T.unroll(SECTION):
                        found[c, i * COUNTERS + thread] = 0
            T.sync_threads()
            share = thread // THREADS
            first = T.cast(block, "int64") * (SECTION * chunk) + thread % THREADS
            for i in T.serial(T.truncdiv(chunk, THREADS)):
                for j in T.unroll(loads):
                    read_id(ids, first + (j * shares + share) * chunk + i * THREADS, size, num_experts, id, j)
                for j in T.unroll(loads):
                    if id[j] < num_experts:
                        T.atomic_add(found[j * shares + share, id[j]], 1)
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_experts, COUNTERS)):
                e = i * COUNTERS + thread
                if e < num_experts:
                    sum[0] = 0
                    for c in T.unroll(SECTION):
                        if block * SECTION + c < chunks:
                            before[block * SECTION + c, e] = sum[0]
                        sum[0] = sum[0] + found[c, e]
                    totals[block, e] = sum[0]

    return count_pairs


def build(num_experts: int, num_topk: int, counted: bool, ids_dtype: str):
    """Place the pairs. ``counted``: a first launch has counted them."""
    size, rows = T.dynamic("size"), T.dynamic("rows")
    sections, chunks = T.dynamic("sections"), T.dynamic("chunks")
    bits = num_experts.bit_length()
    each = (num_experts + THREADS - 1) // THREADS  # experts of a thread in the scan

    def steps(part):
        return T.truncdiv(part, 32) if counted else 1

    @T.prim_func
    def get_fused_mapping(
        ids: T.Tensor((size,), ids_dtype),
        section_totals: T.Tensor((sections, num_experts), "int32"),
        before_chunk: T.Tensor((chunks, num_experts), "int32"),
        pos_to_expert: T.Tensor((rows,), "int32"),
        pos_to_token: T.Tensor((rows,), "int32"),
        pos_to_token_topk: T.Tensor((rows,), "int32"),
        token_topk_to_pos: T.Tensor((size,), "int32"),
        expert_start: T.Tensor((num_experts,), "int32"),
        expert_end: T.Tensor((num_experts,), "int32"),
        expert_size: T.Tensor((num_experts,), "int32"),
        pairs: T.int32,
        chunk: T.int32,
        blocks: T.int32,
        alignment: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            warp = thread // 32
            # One entry more than experts, so that an id that belongs to none can be looked up.
            total = T.alloc_shared((num_experts + 1,), "int32")
            before = T.alloc_shared((num_experts + 1,), "int32")
            start = T.alloc_shared((num_experts + 1,), "int32")
            place = T.alloc_shared((WARPS, num_experts + 1), "int32")
            warp_sums = T.alloc_shared((WARPS,), "int32")
            id = T.alloc_local((max(BATCH, SECTIONS_AT_ONCE),), "int32")
            sum = T.alloc_local((2,), "int32")
            same = T.alloc_local((1,), "uint32")
            vote = T.alloc_local((1,), "uint32")
            rank = T.alloc_local((1,), "int32")
            position = T.alloc_local((1,), "int32")
            own = T.alloc_local((1,), "int32")
            part = T.truncdiv(chunk, WARPS)
            first = block * chunk + warp * part
            if not counted:  # a chunk is a pair for each thread, whose id is kept
                read_id(ids, first + lane, pairs, num_experts, own, 0)

            # Pairs of every expert: in all, before this chunk, and in the part of the chunk of each warp.
            for i in T.serial(T.ceildiv(num_experts + 1, THREADS)):
                e = i * THREADS + thread
                if e <= num_experts:
                    total[e] = 0
                    before[e] = 0
                    for w in T.unroll(WARPS):
                        place[w, e] = 0
            T.sync_threads()
            if counted:
                for i in T.serial(T.ceildiv(num_experts, THREADS)):
                    e = i * THREADS + thread
                    if e < num_experts:
                        sum[0] = 0
                        sum[1] = before_chunk[block, e]
                        for s in T.serial(T.truncdiv(sections + SECTIONS_AT_ONCE - 1, SECTIONS_AT_ONCE)):
                            for j in T.unroll(SECTIONS_AT_ONCE):
                                id[j] = 0
                                if s * SECTIONS_AT_ONCE + j < sections:
                                    id[j] = section_totals[s * SECTIONS_AT_ONCE + j, e]
                            for j in T.unroll(SECTIONS_AT_ONCE):
                                if s * SECTIONS_AT_ONCE + j < T.truncdiv(block, SECTION):
                                    sum[1] = sum[1] + id[j]
                                sum[0] = sum[0] + id[j]
                        total[e] = sum[0]
                        before[e] = sum[1]
            else:
                for i in T.serial(T.truncdiv(pairs + BATCH * THREADS - 1, BATCH * THREADS)):
                    for j in T.unroll(BATCH):
                        read_id(ids, (i * BATCH + j) * THREADS + thread, pairs, num_experts, id, j)
                    for j in T.unroll(BATCH):
                        if id[j] < num_experts:
                            T.atomic_add(total[id[j]], 1)
                            if (i * BATCH + j) * THREADS + thread < block * chunk:
                                T.atomic_add(before[id[j]], 1)
            for i in T.serial(steps(part)):
                if counted:
                    read_id(ids, first + i * 32 + lane, pairs, num_experts, own, 0)
                if own[0] < num_experts:
                    T.atomic_add(place[warp, own[0]], 1)
            T.sync_threads()

            # Start of every region, and of every warp's pairs in it.
            sum[0] = 0
            for i in T.unroll(each):
                e = thread * each + i
                if e < num_experts:
                    sum[0] = sum[0] + rounded_up(total[e], alignment)
            exclusive_scan(sum, warp_sums, thread, WARPS)
            for i in T.unroll(each):
                e = thread * each + i
                if e < num_experts:
                    start[e] = sum[0]
                    position[0] = sum[0] + before[e]
                    for w in T.unroll(WARPS):
                        rank[0] = place[w, e]
                        place[w, e] = position[0]
                        position[0] = position[0] + rank[0]
                    position[0] = rounded_up(total[e], alignment)
                    sum[0] = sum[0] + position[0]
                    if block == 0:
                        expert_start[e] = start[e]
                        expert_end[e] = sum[0]
                        expert_size[e] = position[0]
            T.sync_threads()

            # Rank of every pair among those of its expert.
            for i in T.serial(steps(part)):
                pair = first + i * 32 + lane
                if counted:
                    read_id(ids, pair, pairs, num_experts, own, 0)
                same[0] = T.uint32(0xFFFFFFFF)
                for bit in T.unroll(bits):
                    vote[0] = ballot((own[0] >> bit) & 1)
                    same[0] = same[0] & T.if_then_else((own[0] >> bit) & 1 != 0, vote[0], ~vote[0])
                rank[0] = popcount(same[0] & below(lane))
                position[0] = place[warp, own[0]] + rank[0]
                T.sync_warp()
                if rank[0] == 0:
                    place[warp, own[0]] = position[0] + popcount(same[0])
                T.sync_warp()
                if pair < pairs:
                    if own[0] == num_experts or position[0] >= rows:
                        position[0] = -1
                    token_topk_to_pos[pair] = position[0]
                    if position[0] >= 0:
                        pos_to_expert[position[0]] = own[0]
                        pos_to_token[position[0]] = T.truncdiv(pair, num_topk)
                        pos_to_token_topk[position[0]] = pair

            # Padding behind every region, and the rows behind the last one.
            for i in T.serial(T.truncdiv(num_experts + blocks * WARPS - 1, blocks * WARPS)):
                e = (i * blocks + block) * WARPS + warp
                if e < num_experts:
                    position[0] = start[e] + total[e] + lane
                    rank[0] = T.min(start[e] + rounded_up(total[e], alignment), rows)
                    while position[0] < rank[0]:
                        pos_to_expert[position[0]] = -1
                        pos_to_token[position[0]] = -1
                        pos_to_token_topk[position[0]] = -1
                        position[0] = position[0] + 32
            sum[1] = sum[1] + block * THREADS + thread
            while sum[1] < rows:
                pos_to_expert[sum[1]] = -1
                pos_to_token[sum[1]] = -1
                pos_to_token_topk[sum[1]] = -1
                sum[1] = sum[1] + blocks * THREADS

    return get_fused_mapping
