"""Element-wise renumbering of expert ids for one tensor-parallel rank."""

import tilelang.language as T

THREADS = 128


@T.macro
def keep_local(id, experts, per_rank, tp_rank, num_tp_ranks):
    """id[0] (int32) becomes the number within the tensor-parallel rank, or -1.

    ``per_rank`` consecutive experts belong to one rank; ``experts`` bounds the valid ids.
    """
    block = T.alloc_local((1,), "int32")
    if id[0] < 0 or id[0] >= experts:
        id[0] = -1
    if num_tp_ranks > 1 and id[0] >= 0:  # else no id changes, and divisions are slow
        block[0] = T.truncdiv(id[0], per_rank)
        if T.truncmod(block[0], num_tp_ranks) != tp_rank:
            id[0] = -1
        else:
            # Of every num_tp_ranks blocks one is kept: the blocks before it close up.
            id[0] = id[0] - block[0] * per_rank + T.truncdiv(block[0], num_tp_ranks) * per_rank


def build(dtype: str):
    size = T.dynamic("size")

    @T.prim_func
    def mask_indices_by_tp(
        indices: T.Tensor((size,), dtype),
        local: T.Tensor((size,), dtype),
        experts: T.int32,
        per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        with T.Kernel(T.ceildiv(size, THREADS), threads=THREADS) as block:
            at = block * THREADS + T.get_thread_binding()
            id = T.alloc_local((1,), "int32")
            if at < size:
                # Checked before the conversion: an id past 2^31 must not wrap into the valid range.
                id[0] = T.if_then_else(indices[at] < T.cast(experts, dtype), T.cast(indices[at], "int32"), -1)
                if indices[at] < T.cast(0, dtype):
                    id[0] = -1
                keep_local(id, experts, per_rank, tp_rank, num_tp_ranks)
                local[at] = T.cast(id[0], dtype)

    return mask_indices_by_tp
