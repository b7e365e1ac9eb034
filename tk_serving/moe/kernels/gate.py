"""Router gate: from logits to the ids and weights of the chosen experts of a token.

One warp picks the experts. Every lane holds the ranking keys of every 32nd expert (of one expert in each group, where
groups are selected first); K rounds of a warp-wide maximum follow, after which lane k looks after slot k alone.

The scores come from this warp as well where there are tokens enough to fill the device; lane k then computes the score
of its expert again, which is cheaper than carrying all scores in registers. For few tokens the latency counts: a block
looks after one token, and every thread of it after one expert. Both ways give the same bits.
"""

import tilelang.language as T

from tk_serving.moe.kernels.mask_indices_by_tp import keep_local
from tk_serving.moe.kernels.ranking import LARGEST, TAKEN, best_groups, best_of_warp, finite, sortable
from tk_serving.moe.kernels.warp import ballot, fold_max, fold_sum

WARPS = 4
MAX_WARPS = 16  # of a token
TINY = 1e-20
SPREAD = 23333  # of consecutive tokens over the copies of an expert


def score_of_logit(x, scoring, top, total):
    """Score of a finite logit; ``top`` and ``total`` are the maximum and the sum of exponentials of a softmax."""
    if scoring == "sigmoid":
        return T.float32(1) / (T.float32(1) + T.exp(-x))
    if scoring == "sqrtsoftplus":
        return T.sqrt(T.if_then_else(x > T.float32(20), x, T.log1p(T.exp(x))))
    return T.exp(x - top) / total


def mixed(word):
    """A hash of 32 bits."""
    word = word ^ (word >> T.uint32(16))
    word = word * T.uint32(0x7FEB352D)
    word = word ^ (word >> T.uint32(15))
    word = word * T.uint32(0x846CA68B)
    return word ^ (word >> T.uint32(16))


@T.macro
def draw(id, weight, token, slot, slots, ep_rank, num_physical):
    """A pseudo-random expert and weight for one slot; the slots of a token draw from disjoint ranges of ids."""
    seed = T.alloc_local((1,), "uint32")
    word = T.alloc_local((1,), "uint32")
    low = T.alloc_local((1,), "int64")
    size = T.alloc_local((1,), "int64")
    seed[0] = T.cast(token, "uint32") * T.uint32(0x9E3779B1) + T.cast(ep_rank, "uint32") * T.uint32(0x85EBCA77)
    seed[0] = mixed(seed[0])
    low[0] = T.truncdiv(T.cast(slot, "int64") * num_physical, slots)
    size[0] = T.truncdiv(T.cast(slot + 1, "int64") * num_physical, slots) - low[0]
    word[0] = mixed(seed[0] + T.cast(slot + 1, "uint32"))
    low[0] = low[0] + T.truncmod(T.cast(word[0], "int64"), size[0])
    word[0] = mixed(seed[0] ^ T.uint32(0xA511E9B3))
    low[0] = low[0] + T.truncmod(T.cast(word[0], "int64"), T.cast(num_physical, "int64"))
    id[0] = T.cast(T.truncmod(low[0], T.cast(num_physical, "int64")), "int32")
    word[0] = mixed(seed[0] + T.cast(slot + 64, "uint32")) >> T.uint32(8)
    weight[0] = T.cast(word[0], "float32") * T.float32(2**-24)


def build(
    num_experts: int,
    num_topk: int,
    num_shared: int,
    scoring: str,
    num_groups: int,
    num_kept: int,
    fold: bool,
    local: bool,
    table: str,
    token_ids: str,
    options: tuple[str, ...],
    spread: bool,
    logits_dtype: str,
    ids_dtype: str,
):
    """The gate for one router.

    Args:
        num_groups, num_kept: groups of experts and how many of them are kept; equal where groups play no role.
        fold: add the scores as a tree over the lanes instead of in ascending order.
        local: renumber the ids for one tensor-parallel rank.
        table, token_ids: dtypes of the hash table and of its row numbers, empty without a table.
        options: names of the optional tensors that are present.
        spread: a block instead of a warp for each token; without a table only.
        logits_dtype: of the logits, float32 or bfloat16.
        ids_dtype: of the ids that are written, int64 or int32.
    """
    grouped = num_kept < num_groups
    width = num_experts // num_groups if grouped else 32
    rows = (num_experts + width - 1) // width
    slots = num_topk + num_shared
    softmax = scoring == "softmax"
    warps = min((num_experts + 31) // 32, MAX_WARPS) if spread else WARPS
    threads = 32 * warps
    step = threads if spread else width
    stride = threads if spread else 32  # of the experts in row-wise loops
    loads = (num_experts + threads - 1) // threads if spread else rows  # experts that a thread reads

    tokens = T.dynamic("tokens")
    copies = T.dynamic("copies")
    vocabulary = T.dynamic("vocabulary")
    row_stride = T.dynamic("row_stride", "int64")

    @T.macro
    def normalise(logits, token, lane, top, total):
        """Maximum and sum of exponentials of a softmax."""
        top[0] = T.float32(-LARGEST)
        for j in T.unroll((num_experts + 31) // 32):
            if j * 32 + lane < num_experts:
                top[0] = T.max(top[0], finite(T.cast(logits[token, j * 32 + lane], "float32")))
        fold_max(top)
        total[0] = 0
        for j in T.unroll((num_experts + 31) // 32):
            if j * 32 + lane < num_experts:
                total[0] = total[0] + T.exp(finite(T.cast(logits[token, j * 32 + lane], "float32")) - top[0])
        fold_sum(total)

    @T.macro
    def read(logits, bias, image_bias, token, expert, logit, added, added_image):
        """Logits and biases of the experts ``expert``, ``expert + step``, ..., all in flight at once."""
        bits = T.alloc_local((1,), "int32")
        voted = T.alloc_local((1,), "uint32")
        bits[0] = 0
        for j in T.unroll(loads):
            logit[j] = 0
            added[j] = 0
            added_image[j] = 0
            if j * step + expert < num_experts:
                logit[j] = T.cast(logits[token, j * step + expert], "float32")
                if "bias" in options:
                    added[j] = bias[j * step + expert]
                if "image_bias" in options:
                    added_image[j] = image_bias[j * step + expert]
        # The compiler would move each load to its first use, behind the branches of the scores before it: one
        # latency after the other. It cannot move them past a vote on all that was loaded.
        for j in T.unroll(loads):
            bits[0] = bits[0] | T.reinterpret(logit[j], "int32")
            if "bias" in options:
                bits[0] = bits[0] | T.reinterpret(added[j], "int32")
            if "image_bias" in options:
                bits[0] = bits[0] | T.reinterpret(added_image[j], "int32")
        voted[0] = ballot(bits[0] != 0)

    @T.macro
    def rank_key(key, score, logit, added, added_image, image):
        """key[0] = the key that an expert of this score ranks by."""
        ranked = T.alloc_local((1,), "float32")
        ranked[0] = logit if softmax else score
        if "image_bias" in options:
            if image[0] != 0:
                ranked[0] = ranked[0] + added_image
            else:
                if "bias" in options:
                    ranked[0] = ranked[0] + added
        else:
            if "bias" in options:
                ranked[0] = ranked[0] + added
        key[0] = sortable(ranked[0])

    @T.macro
    def pick(keys, all_keys, lane, id):
        """id[0] of lane k = expert of rank k."""
        best = T.alloc_local((2,), "int32")
        kept = T.alloc_local((num_kept,), "int32")
        kept_keys = T.alloc_local((num_kept,), "int32")
        if grouped:
            best_groups(keys, lane, num_groups, num_kept, kept)
            for i in T.unroll(num_kept):
                if spread:
                    kept_keys[i] = TAKEN
                    if lane < width:
                        kept_keys[i] = all_keys[kept[i] * width + lane]
                else:
                    kept_keys[i] = keys[i]
                    for j in T.unroll(num_groups - num_kept):
                        if kept[i] > i + j:
                            kept_keys[i] = keys[i + j + 1]
                kept[i] = kept[i] * width + lane
        for k in T.unroll(num_topk, unroll_factor=1):
            if grouped:
                best_of_warp(kept_keys, best, num_kept, lambda j: kept[j])
            else:
                best_of_warp(keys, best, rows, lambda j: j * 32 + lane)
            if lane == k:
                id[0] = best[1]

    @T.macro
    def rank(logit, added, added_image, image, lane, keys):
        """The keys of the experts that a lane has read."""
        key = T.alloc_local((1,), "int32")
        score = T.alloc_local((1,), "float32")
        for j in T.unroll(rows):
            keys[j] = TAKEN
            if lane < width and j * width + lane < num_experts:
                score[0] = 0
                if not softmax:
                    score[0] = score_of_logit(finite(logit[j]), scoring, T.float32(0), T.float32(1))
                rank_key(key, score[0], finite(logit[j]), added[j], added_image[j], image)
                keys[j] = key[0]

    @T.macro
    def score_block(logit, added, added_image, image, thread, all_keys, all_scores, tops, top, total):
        """Keys and scores (softmax: exponentials, and their maximum and sum) of all experts in shared memory."""
        key = T.alloc_local((1,), "int32")
        score = T.alloc_local((1,), "float32")
        if softmax:
            top[0] = T.float32(-LARGEST)
            for j in T.unroll(loads):
                if j * threads + thread < num_experts:
                    top[0] = T.max(top[0], finite(logit[j]))
            fold_max(top)
            if thread % 32 == 0:
                tops[thread // 32] = top[0]
            T.sync_threads()
            for w in T.unroll(warps):
                top[0] = T.max(top[0], tops[w])
        for j in T.unroll(loads):
            if j * threads + thread < num_experts:
                score[0] = score_of_logit(finite(logit[j]), scoring, top[0], T.float32(1))
                rank_key(key, score[0], finite(logit[j]), added[j], added_image[j], image)
                all_keys[j * threads + thread] = key[0]
                all_scores[j * threads + thread] = score[0]
        T.sync_threads()
        if softmax:
            total[0] = 0
            for j in T.unroll((num_experts + 31) // 32):
                if j * 32 + thread % 32 < num_experts:
                    total[0] = total[0] + all_scores[j * 32 + thread % 32]
            fold_sum(total)

    @T.prim_func
    def gate(
        logits: T.Tensor((tokens, num_experts), logits_dtype),
        bias: T.Tensor((num_experts,), "float32"),
        image_bias: T.Tensor((num_experts,), "float32"),
        image_mask: T.Tensor((tokens,), "bool"),
        mask: T.Tensor((tokens,), "bool"),
        fixed_mask: T.Tensor((tokens,), "bool"),
        random_mask: T.Tensor((tokens,), "bool"),
        hash_table: T.Tensor((vocabulary, num_topk), table or "int64"),
        hash_rows: T.Tensor((tokens,), token_ids or "int64"),
        physical: T.Tensor((num_experts + num_shared, copies), "int32"),
        logical_count: T.Tensor((num_experts + num_shared,), "int32"),
        unmapped: T.StridedTensor((tokens, num_topk), (row_stride, 1), "int64"),
        scores: T.Tensor((tokens, num_experts), "float32"),
        ids: T.Tensor((tokens, slots), ids_dtype),
        weights: T.Tensor((tokens, slots), "float32"),
        factor: T.float32,
        ep_rank: T.int32,
        num_physical: T.int32,
        per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        with T.Kernel(tokens if spread else T.ceildiv(tokens, WARPS), threads=threads) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block if spread else block * WARPS + thread // 32
            live = T.alloc_local((1,), "int32")
            drawn = T.alloc_local((1,), "int32")
            fixed = T.alloc_local((1,), "int32")
            image = T.alloc_local((1,), "int32")
            id = T.alloc_local((1,), "int32")
            source = T.alloc_local((1,), "int64")
            weight = T.alloc_local((1,), "float32")
            score = T.alloc_local((1,), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            count = T.alloc_local((1,), "int32")
            logit = T.alloc_local((loads,), "float32")
            added = T.alloc_local((loads,), "float32")
            added_image = T.alloc_local((loads,), "float32")
            keys = T.alloc_local((rows,), "int32")
            all_keys = T.alloc_shared((num_experts if spread else 1,), "int32")
            all_scores = T.alloc_shared((num_experts if spread else 1,), "float32")
            tops = T.alloc_shared((warps,), "float32")
            if token < tokens:
                # All loads that depend on nothing come first.
                if table == "":
                    if spread:
                        read(logits, bias, image_bias, token, thread, logit, added, added_image)
                    else:
                        # A lane past the end of a narrow group reads an expert of the next, and does not use it.
                        read(logits, bias, image_bias, token, lane, logit, added, added_image)
                live[0] = 1
                drawn[0] = 0
                fixed[0] = 0
                image[0] = 0
                if "mask" in options:
                    live[0] = T.cast(mask[token], "int32")
                if "force_random" in options:
                    drawn[0] = live[0] & T.cast(random_mask[token], "int32")
                    live[0] = live[0] - drawn[0]
                if "fix_routing_mask" in options:
                    fixed[0] = T.cast(fixed_mask[token], "int32")
                if "image_bias" in options:
                    image[0] = T.cast(image_mask[token], "int32")
                if spread:
                    score_block(logit, added, added_image, image, thread, all_keys, all_scores, tops, top, total)
                elif softmax:
                    normalise(logits, token, lane, top, total)
                if "scores" in options:
                    for j in T.unroll((num_experts + stride - 1) // stride):
                        e = j * stride + (thread if spread else lane)
                        if e < num_experts:
                            score[0] = 0
                            if live[0] != 0:
                                if spread:
                                    score[0] = all_scores[e] / total[0] if softmax else all_scores[e]
                                else:
                                    score[0] = score_of_logit(
                                        finite(T.cast(logits[token, e], "float32")), scoring, top[0], total[0]
                                    )
                            scores[token, e] = score[0]

                if thread < 32 or not spread:
                    id[0] = -1
                    weight[0] = 0
                    if live[0] != 0:
                        # Logical ids.
                        if table != "":
                            source[0] = T.cast(hash_rows[token], "int64")
                            if lane < num_topk and source[0] >= T.int64(0) and source[0] < vocabulary:
                                source[0] = T.cast(hash_table[source[0], lane], "int64")
                                if source[0] >= T.int64(0) and source[0] < T.int64(num_experts):
                                    id[0] = T.cast(source[0], "int32")
                        else:
                            if fixed[0] != 0:
                                if "fix_routing_mask" in options:
                                    if lane < num_topk:
                                        source[0] = unmapped[token, lane]
                                        if source[0] >= T.int64(0) and source[0] < T.int64(num_experts):
                                            id[0] = T.cast(source[0], "int32")
                            else:
                                if spread:
                                    for j in T.unroll(rows):
                                        keys[j] = TAKEN
                                        if lane < width and j * width + lane < num_experts:
                                            keys[j] = all_keys[j * width + lane]
                                else:
                                    rank(logit, added, added_image, image, lane, keys)
                                pick(keys, all_keys, lane, id)
                        if "unmapped_topk_idx" in options:
                            if lane < num_topk and fixed[0] == 0:
                                unmapped[token, lane] = T.cast(id[0], "int64")

                        # Weights: the scores without bias, over their sum.
                        score[0] = 0
                        if id[0] >= 0:
                            if spread:
                                score[0] = all_scores[id[0]] / total[0] if softmax else all_scores[id[0]]
                            else:
                                score[0] = score_of_logit(
                                    finite(T.cast(logits[token, id[0]], "float32")), scoring, top[0], total[0]
                                )
                        if fold:
                            total[0] = score[0]
                            fold_sum(total)
                            total[0] = total[0] + T.float32(TINY)
                        else:
                            total[0] = T.float32(TINY)
                            for k in T.unroll(num_topk):
                                total[0] = total[0] + T.shfl_sync(score[0], k)
                        weight[0] = score[0] / total[0] * factor

                        if num_shared > 0:
                            if lane >= num_topk:
                                id[0] = num_experts + lane - num_topk
                                weight[0] = 1
                        if "to_physical_map" in options:
                            if lane < slots and id[0] >= 0:
                                count[0] = logical_count[id[0]]
                                if count[0] > 0:
                                    source[0] = T.truncmod(
                                        T.cast(ep_rank, "int64") + T.cast(token, "int64") * T.int64(SPREAD),
                                        T.cast(count[0], "int64"),
                                    )
                                    if source[0] < copies:
                                        id[0] = T.max(physical[id[0], source[0]], -1)
                                    else:
                                        id[0] = -1
                                else:
                                    id[0] = -1
                        if local:
                            keep_local(id, num_physical, per_rank, tp_rank, num_tp_ranks)
                    else:
                        if "force_random" in options:
                            if drawn[0] != 0:
                                draw(id, weight, token, lane, slots, ep_rank, num_physical)
                        if "unmapped_topk_idx" in options:
                            if lane < num_topk:
                                unmapped[token, lane] = T.int64(-1)

                    if lane < slots:
                        ids[token, lane] = T.cast(id[0], ids_dtype)
                        weights[token, lane] = weight[0]

    return gate
