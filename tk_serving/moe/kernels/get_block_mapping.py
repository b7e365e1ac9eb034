"""Rows of pairs in an expert-major order of whole blocks, in one launch.

Votes compare the pairs of a warp: for each bit of their experts' numbers one, highest first, tells which lanes have
the same expert and which a smaller one. Up to 32 pairs need no more than that. More of them meet in shared memory,
where every warp leaves its number of pairs of every expert.

Every block ranks all pairs and writes its own part of the rows: all that is theirs as rows without a pair, before the
barrier, and then the pairs.
"""

import tilelang.language as T

from tk_serving.moe.get_block_mapping import FEW_PAIRS, THREADS
from tk_serving.moe.kernels.warp import ballot, below, exclusive_scan, popcount

WARP = 32


@T.macro
def expert_of(id, experts, num_experts, mapped, expert):
    """expert[0] = the expert of a pair (int32), ``num_experts`` where it has none; id[0] is int64."""
    expert[0] = num_experts
    if id[0] >= T.int64(0) and id[0] < T.int64(num_experts):
        expert[0] = T.cast(id[0], "int32")
        if mapped:
            expert[0] = experts[expert[0]]
            if expert[0] < 0 or expert[0] >= num_experts:
                expert[0] = num_experts


@T.macro
def clear(sorted_ids, expert_ids, rows, blocks, block, part, pairs, thread, threads):
    """This block's rows without pairs; the first block's also: no expert for any block of rows."""
    row = T.alloc_local((1,), "int32")
    row[0] = block * part + thread
    while row[0] < T.min((block + 1) * part, rows):
        sorted_ids[row[0]] = pairs
        row[0] = row[0] + threads
    if block == 0:
        row[0] = thread
        while row[0] < blocks:
            expert_ids[row[0]] = 0
            row[0] = row[0] + threads


@T.macro
def compare(expert, bits, same, smaller):
    """The lanes with the same expert, and those with a smaller one."""
    vote = T.alloc_local((1,), "uint32")
    same[0] = T.uint32(0xFFFFFFFF)
    smaller[0] = T.uint32(0)
    for i in T.unroll(bits):
        vote[0] = ballot((expert[0] >> (bits - 1 - i)) & 1)
        if (expert[0] >> (bits - 1 - i)) & 1 != 0:
            smaller[0] = smaller[0] | (same[0] & ~vote[0])
            same[0] = same[0] & vote[0]
        else:
            same[0] = same[0] & ~vote[0]


def few(num_experts: int, ids_dtype: str, mapped: bool):
    """Up to 32 pairs: every warp ranks them, the first one writes them."""
    size, rows, blocks = T.dynamic("size"), T.dynamic("rows"), T.dynamic("row_blocks")
    bits = num_experts.bit_length()
    threads = THREADS[True]

    @T.prim_func
    def get_block_mapping(
        ids: T.Tensor((size,), ids_dtype),
        experts: T.Tensor((num_experts,), "int32"),
        sorted_ids: T.Tensor((rows,), "int32"),
        expert_ids: T.Tensor((blocks,), "int32"),
        used_rows: T.Tensor((1,), "int32"),
        pairs: T.int32,
        block_size: T.int32,
        part: T.int32,
        parts: T.int32,
    ):
        with T.Kernel(parts, threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % WARP
            id = T.alloc_local((1,), "int64")
            expert = T.alloc_local((1,), "int32")
            same = T.alloc_local((1,), "uint32")
            smaller = T.alloc_local((1,), "uint32")
            vote = T.alloc_local((1,), "uint32")
            first = T.alloc_local((1,), "int32")
            taken = T.alloc_local((1,), "int32")
            all = T.alloc_local((1,), "int32")
            row = T.alloc_local((1,), "int32")
            id[0] = T.int64(-1)
            if lane < pairs:
                id[0] = T.cast(ids[lane], "int64")
            clear(sorted_ids, expert_ids, rows, blocks, block, part, pairs, thread, threads)
            expert_of(id, experts, num_experts, mapped, expert)

            # Blocks of rows of this pair's expert, counted at its first pair; of smaller experts; and of all.
            compare(expert, bits, same, smaller)
            taken[0] = 0
            if expert[0] < num_experts and (same[0] & below(lane)) == T.uint32(0):
                taken[0] = T.truncdiv(popcount(same[0]) + block_size - 1, block_size)
            first[0] = 0
            all[0] = 0
            for bit in T.unroll(FEW_PAIRS.bit_length()):
                vote[0] = ballot((taken[0] >> bit) & 1)
                first[0] = first[0] + (popcount(vote[0] & smaller[0]) << bit)
                all[0] = all[0] + (popcount(vote[0]) << bit)
            T.sync_threads()
            if thread < WARP and expert[0] < num_experts:
                row[0] = first[0] * block_size + popcount(same[0] & below(lane))
                if row[0] >= block * part and row[0] < (block + 1) * part:
                    sorted_ids[row[0]] = lane
                if block == 0:
                    for i in T.serial(taken[0]):
                        expert_ids[first[0] + i] = expert[0]
            if block == 0 and thread == 0:
                used_rows[0] = all[0] * block_size

    return get_block_mapping


def build(num_experts: int, ids_dtype: str, mapped: bool):
    """One pair for each thread, one expert or two."""
    size, rows, blocks = T.dynamic("size"), T.dynamic("rows"), T.dynamic("row_blocks")
    bits = num_experts.bit_length()
    threads = THREADS[False]
    warps = threads // WARP
    entries = num_experts + 1  # of a warp; the last is for pairs without expert
    each = (num_experts + threads - 1) // threads

    @T.prim_func
    def get_block_mapping(
        ids: T.Tensor((size,), ids_dtype),
        experts: T.Tensor((num_experts,), "int32"),
        sorted_ids: T.Tensor((rows,), "int32"),
        expert_ids: T.Tensor((blocks,), "int32"),
        used_rows: T.Tensor((1,), "int32"),
        pairs: T.int32,
        block_size: T.int32,
        part: T.int32,
        parts: T.int32,
    ):
        with T.Kernel(parts, threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % WARP
            warp = thread // WARP
            # Of each warp's pairs of an expert: their number, then the row of the first.
            place = T.alloc_shared((warps * entries,), "int32")
            warp_sums = T.alloc_shared((warps,), "int32")
            id = T.alloc_local((1,), "int64")
            expert = T.alloc_local((1,), "int32")
            same = T.alloc_local((1,), "uint32")
            smaller = T.alloc_local((1,), "uint32")
            taken = T.alloc_local((each,), "int32")
            sum = T.alloc_local((2,), "int32")
            row = T.alloc_local((2,), "int32")
            id[0] = T.int64(-1)
            if thread < pairs:
                id[0] = T.cast(ids[thread], "int64")
            busy = T.truncdiv(pairs + WARP - 1, WARP)  # warps that have pairs
            row[0] = thread
            while row[0] < busy * entries:
                place[row[0]] = 0
                row[0] = row[0] + threads
            clear(sorted_ids, expert_ids, rows, blocks, block, part, pairs, thread, threads)
            expert_of(id, experts, num_experts, mapped, expert)
            compare(expert, bits, same, smaller)
            T.sync_threads()
            if expert[0] < num_experts and (same[0] & below(lane)) == T.uint32(0):
                place[warp * entries + expert[0]] = popcount(same[0])
            T.sync_threads()

            # Blocks of rows of every expert, and their sum over the experts before.
            sum[0] = 0
            for i in T.unroll(each):
                taken[i] = 0
                if thread * each + i < num_experts:
                    for w in T.serial(busy):
                        taken[i] = taken[i] + place[w * entries + thread * each + i]
                    taken[i] = T.truncdiv(taken[i] + block_size - 1, block_size)
                sum[0] = sum[0] + taken[i]
            exclusive_scan(sum, warp_sums, thread, warps)
            for i in T.unroll(each):
                if thread * each + i < num_experts:
                    row[0] = sum[0] * block_size
                    for w in T.serial(busy):
                        row[1] = place[w * entries + thread * each + i]
                        place[w * entries + thread * each + i] = row[0]
                        row[0] = row[0] + row[1]
                    if block == 0:
                        for j in T.serial(taken[i]):
                            expert_ids[sum[0] + j] = thread * each + i
                sum[0] = sum[0] + taken[i]
            T.sync_threads()
            if expert[0] < num_experts:
                row[0] = place[warp * entries + expert[0]] + popcount(same[0] & below(lane))
                if row[0] >= block * part and row[0] < (block + 1) * part:
                    sorted_ids[row[0]] = thread
            if block == 0 and thread == 0:
                used_rows[0] = sum[1] * block_size

    return get_block_mapping
