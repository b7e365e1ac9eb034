"""Positions of (token, choice) pairs in an expert-major layout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect, short
from tk_serving.moe import _contents
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, Model, Workload, at_one_size, serving

MAX_EXPERTS = 1024
MAX_ROWS = 2**31 - 2**20  # leaves room for the steps of the last loop
MAX_PAIRS_IN_ONE_LAUNCH = 2048
CHUNK = 256  # pairs of a block, or a multiple
SECTION = 8  # chunks
MAX_SECTIONS = 256  # every block reads the counts of all
ROWS_PER_BLOCK = 2048  # to fill with padding
EXPERTS_PER_BLOCK = 8  # whose regions a block pads: one for each of its warps
MAX_BLOCKS = 1024

_expect = Expect("get_fused_mapping")


def capacity(pairs: int, num_experts: int, alignment: int) -> int:
    """Rows that suffice for every choice of experts: those without pairs take none."""
    most = pairs + min(pairs, num_experts) * (alignment - 1)
    return -(-most // alignment) * alignment


def _plan(topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool) -> Plan:
    tokens, topk = _expect.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), ("T", "K"))
    _expect.that(topk > 0, "topk_idx", "at least one column", [tokens, topk])
    _expect.between("num_experts", num_experts, 1, MAX_EXPERTS)
    _expect.at_least("alignment", alignment, 1)
    _expect.between("num_expanded_tokens", num_expanded_tokens, 0, MAX_ROWS)
    pairs = tokens * topk
    most = pairs + (alignment - 1) * num_experts
    got = f"{pairs} pairs at alignment {alignment}"
    _expect.that(most <= MAX_ROWS, "topk_idx", f"at most {MAX_ROWS} rows", got)
    synchronises = num_expanded_tokens == 0 and not force_no_sync
    if synchronises and _capturing(topk_idx):
        raise RuntimeError(
            "get_fused_mapping: force_no_sync: expected True, or num_expanded_tokens > 0, while a CUDA graph is "
            "captured: the counts would be copied to the host"
        )
    rows = num_expanded_tokens or most // alignment * alignment
    ids = {"num_experts": num_experts, "ids_dtype": short(topk_idx.dtype)}
    config = {**ids, "num_topk": topk}
    placing: tuple[Launch, ...]
    if pairs <= MAX_PAIRS_IN_ONE_LAUNCH:
        placing = (Launch("moe.get_fused_mapping", {**config, "counted": False}, _arguments_of_one),)
        # Stand-ins for the empty tensors of an empty batch.
        scratch: tuple[Out, ...] = () if tokens else (Out((1,), topk_idx.dtype), Out((1,), torch.int32))
    else:
        sections, chunks, _ = _division(pairs)
        placing = (
            Launch("moe.get_fused_mapping:count", ids, _arguments_of_count),
            Launch("moe.get_fused_mapping", {**config, "counted": True}, _arguments_of_place),
        )
        scratch = (Out((sections, num_experts), torch.int32), Out((chunks, num_experts), torch.int32))
    outputs = (
        *(Out((rows,), torch.int32) for _ in range(3)),
        Out((tokens, topk), torch.int32),
        *(Out((num_experts,), torch.int32) for _ in range(3)),
    )
    return Plan(outputs, placing if rows else (), scratch, lasting=not synchronises)


def _division(pairs: int) -> tuple[int, int, int]:
    """Sections, chunks, and pairs in each chunk."""
    chunk = -(-pairs // (MAX_SECTIONS * SECTION * CHUNK)) * CHUNK
    return -(-pairs // (SECTION * chunk)), -(-pairs // chunk), chunk


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _arguments_of_one(out: Sequence[Tensor], topk_idx: Tensor, *rest: int) -> tuple:
    pairs, alignment = topk_idx.numel(), rest[2]
    ids, positions = (topk_idx.view(-1), out[3].view(-1)) if pairs else out[7:9]
    padding = max(-(-out[0].shape[0] // ROWS_PER_BLOCK), -(-rest[0] // EXPERTS_PER_BLOCK))
    blocks = max(-(-pairs // CHUNK), min(padding, MAX_BLOCKS))
    return ids, None, None, *out[:3], positions, *out[4:7], pairs, CHUNK, blocks, alignment


def _arguments_of_count(out: Sequence[Tensor], topk_idx: Tensor, *_: int) -> tuple:
    return topk_idx.view(-1), out[7], out[8], _division(topk_idx.numel())[2]


def _arguments_of_place(out: Sequence[Tensor], topk_idx: Tensor, *rest: int) -> tuple:
    _, blocks, chunk = _division(topk_idx.numel())
    ids, positions = topk_idx.view(-1), out[3].view(-1)
    return ids, out[7], out[8], *out[:3], positions, *out[4:7], topk_idx.numel(), chunk, blocks, rest[2]


def _finish(
    flat: Sequence[Tensor], topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, no_sync: bool
) -> tuple:
    if num_expanded_tokens > 0 or no_sync:
        return *flat, []
    counts = flat[6].tolist()
    rows = sum(counts)
    return *(positions[:rows] for positions in flat[:3]), *flat[3:], counts


def _verify(topk_idx: Tensor, num_experts: int, *_: int) -> None:
    _contents.below(_expect, "topk_idx", topk_idx, num_experts)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    experts: int,
    topk: int,
    alignment: int = 128,
    rows: int | None = None,
    ids: str = "distinct",
    dtype: str = "int64",
) -> tuple:
    idx = make.topk_ids(tokens, experts, topk, ids)
    rows = capacity(tokens * topk, experts, alignment) if rows is None else rows
    return idx.to(getattr(torch, dtype)), experts, rows, alignment, True


def _workloads() -> tuple[Workload, ...]:
    """With ids as most engines have them; and as int64, at a size of each phase."""

    def parameters(model: Model, dtype: str) -> dict[str, object]:
        return {"experts": model.n_routed_experts, "topk": model.num_experts_per_tok, "dtype": dtype}

    wide = serving(lambda model: parameters(model, "int64"))
    return serving(lambda model: parameters(model, "int32")) + at_one_size(wide)


@operator(
    spec="operators.md P25",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    finish=_finish,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "experts": 3, "topk": 2, "alignment": 4, "rows": 9},
        {"tokens": 0, "experts": 3, "topk": 2, "alignment": 1, "rows": 0},
        {"tokens": 37, "experts": 256, "topk": 8},
        {"tokens": 500, "experts": 256, "topk": 8, "alignment": 16, "ids": "any", "rows": 0},
        {"tokens": 40, "experts": 3, "topk": 2, "alignment": 4, "ids": "any", "rows": 50},
        {"tokens": 7000, "experts": 40, "topk": 6, "alignment": 128},
        {"tokens": 4500, "experts": 1000, "topk": 2, "alignment": 1, "ids": "any", "rows": 8000},
        {"tokens": 2000, "experts": 3, "topk": 5, "ids": "one", "alignment": 64},
        {"tokens": 37, "experts": 40, "topk": 3, "ids": "any", "dtype": "int32"},
        {"tokens": 1400, "experts": 40, "topk": 3, "ids": "any", "dtype": "int32"},
    ],
    workloads=_workloads(),
    peers=["vllm"],
)
def get_fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Positions of all (token, choice) pairs in an expert-major layout with aligned regions.

    Region e holds the pairs of expert e in ascending order of token * K + choice, then padding up to a multiple of
    ``alignment``. Ids outside [0, num_experts) have no position.

    Args:
        topk_idx: int64 or int32 [T, K], contiguous, T * K + (alignment - 1) * E < 2^31 - 2^20.
        num_experts: E, at most 1024.
        num_expanded_tokens: N, the number of rows; pairs beyond it are dropped. 0 takes an upper bound that holds
            for every choice of experts, (T * K + (alignment - 1) * E) rounded down to the alignment.
        alignment: every region is a multiple of this.
        force_no_sync: with ``num_expanded_tokens`` 0, keep the upper bound instead of copying the counts to the host.

    Returns:
        ``pos_to_expert``, ``pos_to_token``, ``pos_to_token_topk`` (token * K + choice): int32 [N], -1 for padding;
        ``token_topk_to_pos``: int32 [T, K], -1 for pairs without position;
        ``expert_start``, ``expert_end``, ``num_tokens_per_expert``: int32 [E], the last with padding;
        a list: with ``num_expanded_tokens`` 0 and not ``force_no_sync`` the counts are copied to the host, the list
        holds them and the three position tensors are trimmed to their sum; otherwise it is empty.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or size.
        RuntimeError: the counts were to be copied to the host while a CUDA graph is captured.
    """
    device = topk_idx.device
    flat = topk_idx.reshape(-1)
    pairs, topk = flat.numel(), topk_idx.shape[1]
    rows = num_expanded_tokens or (pairs + (alignment - 1) * num_experts) // alignment * alignment
    valid = (flat >= 0) & (flat < num_experts)
    count = torch.bincount(flat[valid], minlength=num_experts)
    aligned = (count + alignment - 1) // alignment * alignment
    end = aligned.cumsum(0)
    start = end - aligned

    pair = torch.where(valid, flat, num_experts).argsort(stable=True)[: int(valid.sum())]
    expert = flat[pair]
    rank = torch.arange(len(pair), device=device) - (count.cumsum(0) - count)[expert]
    position = start[expert] + rank
    kept = position < rows
    pair, expert, position = pair[kept], expert[kept], position[kept]

    def scattered(size: int, index: Tensor, value: Tensor) -> Tensor:
        return torch.full((size,), -1, dtype=torch.int32, device=device).scatter_(0, index, value.int())

    return (
        scattered(rows, position, expert),
        scattered(rows, position, pair // topk),
        scattered(rows, position, pair),
        scattered(pairs, pair, position).view(topk_idx.shape),
        start.int(),
        end.int(),
        aligned.int(),
        [],
    )
