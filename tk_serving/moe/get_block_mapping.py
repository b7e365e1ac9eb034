"""Expert-major order of (token, choice) pairs in blocks of rows, as the fused expert kernels of engines read it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect, short
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import MODELS, PHASES, Maker, Workload

MAX_PAIRS = 512
"""A block of threads ranks all pairs, one for each thread."""

FEW_PAIRS = 32
"""A warp ranks them alone."""

MAX_EXPERTS = 1024
MAX_ROWS = 2**30
MAX_BLOCKS = 1024
THREADS = {True: 128, False: MAX_PAIRS}
ROWS_PER_THREAD = 16

_expect = Expect("get_block_mapping")


def capacity(pairs: int, num_experts: int, block_size: int) -> int:
    """Rows that suffice for every choice of experts: those without pairs take none."""
    return pairs + min(pairs, num_experts) * (block_size - 1)


def in_order(
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_pad: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of an implementation that leaves the order of an expert's pairs, or ids of unused blocks, open."""
    rows, device = len(sorted_token_ids), sorted_token_ids.device
    used = num_tokens_post_pad[0]
    unused = torch.arange(len(expert_ids), device=device) * block_size >= used
    block = torch.arange(rows, device=device) // block_size
    owner = torch.where(unused, torch.iinfo(torch.int32).max, expert_ids.long())[block]
    order = (owner << 32 | sorted_token_ids).argsort(stable=True)
    return sorted_token_ids[order], expert_ids.masked_fill(unused, 0), num_tokens_post_pad


def _plan(topk_idx: Tensor, num_experts: int, block_size: int, expert_map: Tensor | None) -> Plan:
    tokens, topk = _expect.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), ("T", "K"))
    pairs = tokens * topk
    _expect.that(pairs <= MAX_PAIRS, "topk_idx", f"at most {MAX_PAIRS} pairs", pairs)
    _expect.between("num_experts", num_experts, 1, MAX_EXPERTS)
    _expect.at_least("block_size", block_size, 1)
    if expert_map is not None:
        _expect.tensor("expert_map", expert_map, torch.int32, (num_experts,))
        _expect.same_device(topk_idx=topk_idx, expert_map=expert_map)
    rows = capacity(pairs, num_experts, block_size)
    _expect.that(rows <= MAX_ROWS, "block_size", f"at most {MAX_ROWS} rows", f"{pairs} pairs in blocks of {block_size}")
    config = {
        "num_experts": num_experts,
        "ids_dtype": short(topk_idx.dtype),
        "mapped": expert_map is not None,
    }
    kernel = "moe.get_block_mapping" + (":few" if pairs <= FEW_PAIRS else "")
    outputs = (Out((rows,), torch.int32), Out((-(-rows // block_size),), torch.int32), Out((1,), torch.int32))
    return Plan(outputs, (Launch(kernel, config, _arguments),) if pairs else ())


def _arguments(
    out: Sequence[Tensor], topk_idx: Tensor, num_experts: int, block_size: int, expert_map: Tensor | None
) -> tuple:
    pairs, rows = topk_idx.numel(), len(out[0])
    at_once = THREADS[pairs <= FEW_PAIRS] * ROWS_PER_THREAD
    part = at_once * -(-rows // (at_once * MAX_BLOCKS))
    return topk_idx.view(-1), expert_map, *out, pairs, block_size, part, -(-rows // part)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    experts: int,
    topk: int,
    block_size: int,
    ids: str = "distinct",
    dtype: str = "int32",
    ranks: int = 0,
) -> tuple:
    idx = make.topk_ids(tokens, experts, topk, ids)
    local = None
    if ranks:  # every so-manieth expert is this rank's
        number = torch.arange(experts)
        local = make.value(torch.where(number % ranks == 1, number // ranks, -1).int())
    return idx.to(getattr(torch, dtype)), experts, block_size, local


def _workloads() -> list[Workload]:
    """Blocks as vLLM chooses them at decode: 8 rows for Marlin's FP4 experts, 16 for Triton's FP8 experts."""
    return [
        Workload(
            f"{model.name}-decode",
            {"experts": model.n_routed_experts, "topk": model.num_experts_per_tok, "block_size": size},
            PHASES["decode"],
            model.key,
        )
        for model in MODELS
        for size in (8 if model.hc_mult else 16,)
    ]


@operator(
    spec="operators.md P25, in the layout of vLLM's moe_align_block_size",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "experts": 3, "topk": 2, "block_size": 4},
        {"tokens": 1, "experts": 256, "topk": 6, "block_size": 8},
        {"tokens": 16, "experts": 3, "topk": 2, "block_size": 4, "ids": "any", "dtype": "int64"},
        {"tokens": 4, "experts": 384, "topk": 8, "block_size": 1, "ids": "one"},
        {"tokens": 5, "experts": 256, "topk": 6, "block_size": 256, "ranks": 2},
        {"tokens": 8, "experts": 256, "topk": 8, "block_size": 64},
        {"tokens": 85, "experts": 384, "topk": 6, "block_size": 48, "ids": "any", "dtype": "int64"},
        {"tokens": 512, "experts": 5, "topk": 1, "block_size": 16, "ids": "any"},
        {"tokens": 40, "experts": 1000, "topk": 8, "block_size": 8, "ids": "any", "ranks": 4},
        {"tokens": 256, "experts": 1, "topk": 2, "block_size": 3, "ids": "one"},
    ],
    workloads=_workloads(),
    variants=[
        Workload(
            f"{model.name}-{name}",
            {"experts": model.n_routed_experts, "topk": model.num_experts_per_tok, "block_size": 8, **more},
            (1, 64),
            model.key,
        )
        for model in MODELS
        for name, more in (("int64", {"dtype": "int64"}), ("of-ranks", {"ranks": 2}))
    ],
    peers=["vllm"],
)
def get_block_mapping(
    topk_idx: Tensor, num_experts: int, block_size: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of up to 512 (token, choice) pairs by expert, each expert's in whole blocks of rows.

    The pairs of an expert are in ascending order; experts without pairs have no block. Ids outside [0, num_experts)
    have no row.

    Args:
        topk_idx: int32 or int64 [T, K], contiguous, T * K at most 512.
        num_experts: E, at most 1024.
        block_size: rows of a block.
        expert_map: int32 [E], the local number of each expert, outside [0, E) (-1) for those of other ranks. Pairs then
            count for the local number, and those of other ranks have no row.

    Returns:
        ``sorted_token_ids``: int32 [N], N = T * K + min(T * K, E) * (block_size - 1): the pair (token * K + choice) of
        each row, T * K for rows without one;
        ``expert_ids``: int32 [ceil(N / block_size)], the expert of each block, 0 behind the last block in use;
        ``num_tokens_post_pad``: int32 [1], rows of the blocks in use.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or size.
    """
    device = topk_idx.device
    expert = topk_idx.reshape(-1).long()
    pairs, rows = len(expert), capacity(topk_idx.numel(), num_experts, block_size)
    valid = (expert >= 0) & (expert < num_experts)
    if expert_map is not None:
        expert = expert_map.long()[expert.clamp(0, num_experts - 1)]
        valid &= (expert >= 0) & (expert < num_experts)
    count = torch.bincount(expert[valid], minlength=num_experts)
    blocks = (count + block_size - 1) // block_size
    start = (blocks.cumsum(0) - blocks) * block_size
    order = torch.where(valid, expert, num_experts).argsort(stable=True)[: int(valid.sum())]
    chosen = expert[order]
    rank = torch.arange(len(order), device=device) - (count.cumsum(0) - count)[chosen]

    sorted_token_ids = torch.full((rows,), pairs, dtype=torch.int32, device=device)
    sorted_token_ids[start[chosen] + rank] = order.int()
    expert_ids = torch.zeros(-(-rows // block_size), dtype=torch.int32, device=device)
    used = torch.arange(num_experts, dtype=torch.int32, device=device).repeat_interleave(blocks)
    expert_ids[: len(used)] = used
    return sorted_token_ids, expert_ids, (blocks.sum() * block_size).int().view(1)
