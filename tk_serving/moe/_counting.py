"""The launches that count ids: one where they are few, else the counts of chunks and their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.operator import Launch, Out, Plan

MAX_IDS_IN_ONE_LAUNCH = 8192
MAX_BINS = 32768  # counters that fit into the shared memory of one multiprocessor
CHUNK = 256


def plan(expect: Expect, name: str, ids: Tensor, bins: int, divisor: Callable[..., float] | None) -> Plan:
    """Histogram of int64 [T, K] ids as int32, or as float32 ``count * bins / divisor(*public arguments)``."""
    tokens, topk = expect.tensor(name, ids, torch.int64, ("T", "K"))
    expect.that(topk > 0, name, "at least one column", [tokens, topk])
    expect.that(tokens * topk < 2**31, name, "fewer than 2^31 ids", tokens * topk)
    out = Out((bins,), torch.float32 if divisor else torch.int32)
    if bins > MAX_BINS:
        return Plan((out,), refusal=f"more than {MAX_BINS} counters")
    if not tokens:
        return Plan((out,))
    counted = tokens * topk > MAX_IDS_IN_ONE_LAUNCH

    def arguments(outputs: Sequence[Tensor], ids: Tensor, *rest: int) -> tuple:
        source = (None, outputs[1]) if counted else (ids.view(-1), None)
        return *source, outputs[0], divisor(ids, *rest) if divisor else 1.0

    total = Launch("moe.group_count", {"bins": bins, "averaged": divisor is not None, "counted": counted}, arguments)
    if not counted:
        return Plan((out,), (total,))
    chunks, counts = count_of_chunks(tokens * topk, bins, at=1)
    return Plan((out,), (chunks, total), (counts,))


def count_of_chunks(ids: int, bins: int, at: int) -> tuple[Launch, Out]:
    """The launch that counts int64 ids in chunks, and its result, which is the output or scratch number ``at``."""
    blocks, chunk = blocks_of(ids)
    launch = Launch("moe.group_count:chunks", {"bins": bins}, lambda outputs, x, *_: (x.view(-1), outputs[at], chunk))
    return launch, Out((blocks, bins), torch.int32)


def blocks_of(ids: int) -> tuple[int, int]:
    """Chunks, and ids in each of them. All chunks are read again by every block that needs their sums: at most 128."""
    wanted = min(128, -(-ids // 2048))
    chunk = -(-ids // (wanted * CHUNK)) * CHUNK
    return -(-ids // chunk), chunk


def histogram(ids: Tensor, bins: int) -> Tensor:
    """int64 [bins]: how often every id in range occurs."""
    flat = ids.reshape(-1)
    return torch.bincount(flat[(flat >= 0) & (flat < bins)], minlength=bins)
