"""What the two router gates share: the stages of the reference in torch, the checks and the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE, Close, Equality
from tk_serving.expect import Expect
from tk_serving.moe import _contents
from tk_serving.plan import Launch
from tk_serving.workloads import Maker

MAX_EXPERTS = 4096
MAX_SLOTS = 32
LOGITS = (torch.float32, torch.bfloat16)
SCORING = ("sigmoid", "sqrtsoftplus", "softmax")
LARGEST = torch.finfo(torch.float32).max
TINY = 1e-20
MAX_SPREAD_TOKENS = 768
MAX_EARLY_EXPERTS = 256


@dataclass(frozen=True)
class Routing(Equality):
    """The same ids, and weights within [T: 1.3e-6/1e-5]."""

    def _values(self, actual: Tensor, expected: Tensor) -> str | None:
        rule = Close(1.3e-6, 1e-5) if actual.is_floating_point() else BITWISE
        return rule.difference(actual, expected)


# -- stages of the reference ------------------------------------------------------------------------------------


def finite(logits: Tensor) -> Tensor:
    """Limited to finite float32 values; NaN becomes the lowest."""
    return logits.float().nan_to_num(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST)


def scores_of(x: Tensor, scoring: str) -> Tensor:
    """Scores of finite logits."""
    if scoring == "sigmoid":
        return 1 / (1 + torch.exp(-x))
    if scoring == "sqrtsoftplus":
        return torch.sqrt(torch.where(x > 20, x, torch.log1p(torch.exp(x))))
    e = torch.exp(x - x.amax(dim=1, keepdim=True))
    return e / e.sum(dim=1, keepdim=True)


def ranked(keys: Tensor) -> Tensor:
    """Keys with NaN ranking lowest."""
    return torch.where(keys.isnan(), -torch.inf, keys)


def descending(keys: Tensor) -> Tensor:
    """Stable order from the largest key to the smallest."""
    return ranked(keys).sort(dim=-1, descending=True, stable=True).indices


def best_groups(keys: Tensor, num_groups: int, num_kept: int) -> Tensor:
    """bool [T, R]: expert belongs to one of the groups with the largest sums of their two largest keys."""
    tokens, experts = keys.shape
    two = ranked(keys).view(tokens, num_groups, experts // num_groups).topk(2, dim=-1).values
    groups = descending(two[..., 0] + two[..., 1])[:, :num_kept]
    kept = torch.zeros(tokens, num_groups, dtype=torch.bool, device=keys.device).scatter_(1, groups, True)
    return kept.repeat_interleave(experts // num_groups, dim=1)


def choose(keys: Tensor, allowed: Tensor | None, num_topk: int) -> Tensor:
    """int64 [T, K]: the allowed experts of the largest keys, ties to the lower id."""
    order = descending(keys)
    if allowed is not None:
        order = order.gather(1, allowed.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
    return order[:, :num_topk]


def scores_at(scores: Tensor, ids: Tensor) -> Tensor:
    """The scores of the chosen experts, 0 for the id -1."""
    return torch.where(ids >= 0, scores.gather(1, ids.clamp(min=0)), 0.0)


def within(ids: Tensor, size: int) -> Tensor:
    """Ids outside [0, size) as -1."""
    return torch.where((ids >= 0) & (ids < size), ids, -1)


def with_shared(ids: Tensor, weights: Tensor, num_experts: int, num_shared: int) -> tuple[Tensor, Tensor]:
    """Append the slots of the shared experts: ids after the routed ones, weight 1."""
    shared = torch.arange(num_experts, num_experts + num_shared, device=ids.device).expand(len(ids), -1)
    return torch.cat([ids, shared], 1), torch.cat([weights, torch.ones_like(shared, dtype=torch.float32)], 1)


def physical(ids: Tensor, to_physical_map: Tensor, logical_count: Tensor, ep_rank: int) -> Tensor:
    """The copy of every logical expert that a token uses; -1 where there is none."""
    token = torch.arange(len(ids), device=ids.device)[:, None]
    at = ids.clamp(min=0)
    count = logical_count[at].long()
    copy = (ep_rank + token * 23333) % count.clamp(min=1)
    known = (ids >= 0) & (count > 0) & (copy < to_physical_map.shape[1])
    found = to_physical_map[at, copy.clamp(max=to_physical_map.shape[1] - 1)].long()
    return torch.where(known & (found >= 0), found, -1)


def draw(tokens: int, slots: int, ep_rank: int, num_physical: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pseudo-random ids, distinct within a token, and weights in [0, 1)."""

    def mixed(word: Tensor) -> Tensor:
        word = word & 0xFFFFFFFF
        word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
        word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
        return word ^ word >> 16

    token = torch.arange(tokens, device=device)[:, None]
    slot = torch.arange(slots, device=device)
    seed = mixed(token * 0x9E3779B1 + ep_rank * 0x85EBCA77)
    # Disjoint ranges of ids for the slots, turned by the same distance.
    low = slot * num_physical // slots
    size = (slot + 1) * num_physical // slots - low
    ids = (low + mixed(seed + slot + 1) % size + mixed(seed ^ 0xA511E9B3) % num_physical) % num_physical
    return ids, (mixed(seed + slot + 64) >> 8).float() * 2**-24


# -- checks and arguments ----------------------------------------------------------------------------------------


def check(
    expect: Expect,
    *,
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    ep_rank: int,
    scoring_func: str,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
    unmapped_topk_idx: Tensor | None,
    fix_routing_mask: Tensor | None,
    masks: dict[str, Tensor | None],
    biases: dict[str, Tensor | None],
) -> tuple[int, int, int]:
    """Check the arguments that both gates take; return tokens, experts and shared slots."""
    tokens, experts = expect.tensor("logits", logits, LOGITS, ("T", "R"))
    expect.that(1 <= experts <= MAX_EXPERTS, "logits", f"1 to {MAX_EXPERTS} experts", experts)
    expect.between("num_topk", num_topk, 1, min(experts, MAX_SLOTS))
    shared = 0
    if use_shared_as_routed:
        expect.between("num_shared_experts", num_shared_experts, 1, 2)
        shared = num_shared_experts
        expect.that(
            num_topk + shared <= MAX_SLOTS, "num_topk", f"at most {MAX_SLOTS - shared} beside shared slots", num_topk
        )
    expect.at_least("ep_rank", ep_rank, 0)
    expect.one_of("scoring_func", scoring_func, SCORING)
    for name, bias in biases.items():
        if bias is not None:
            expect.tensor(name, bias, torch.float32, (experts,))
    for name, mask in masks.items():
        if mask is not None:
            expect.tensor(name, mask, torch.bool, (tokens,))
    expect.together(to_physical_map=to_physical_map, logical_count=logical_count)
    if to_physical_map is not None and logical_count is not None:
        copies = expect.tensor("to_physical_map", to_physical_map, torch.int32, (experts + shared, "Dup"))[1]
        expect.that(copies > shared, "to_physical_map", f"at least {shared + 1} columns", copies)
        expect.tensor("logical_count", logical_count, torch.int32, (experts + shared,))
    if unmapped_topk_idx is not None:
        expect.tensor("unmapped_topk_idx", unmapped_topk_idx, torch.int64, (tokens, num_topk), contiguous=False)
    if fix_routing_mask is not None:
        expect.that(unmapped_topk_idx is not None, "unmapped_topk_idx", "the ids that fix_routing_mask refers to", None)
    expect.same_device(
        logits=logits,
        **biases,
        **masks,
        to_physical_map=to_physical_map,
        logical_count=logical_count,
        unmapped_topk_idx=unmapped_topk_idx,
    )
    return tokens, experts, shared


def verify(
    expect: Expect,
    logits: Tensor,
    fix_routing_mask: Tensor | None,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
    unmapped_topk_idx: Tensor | None,
) -> None:
    """Check the contents that both gates read as indices."""
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        _contents.below(expect, "unmapped_topk_idx", unmapped_topk_idx[fix_routing_mask], logits.shape[1])
    if to_physical_map is not None and logical_count is not None:
        copies = to_physical_map.shape[1]
        _contents.below(expect, "logical_count", logical_count, copies + 1)
        _contents.below(expect, "to_physical_map", to_physical_map, logits.shape[1] + copies - 1)


def is_spread(tokens: int) -> bool:
    """Whether the kernel takes a block for each token: as long as all blocks run at once, for the latency."""
    return tokens <= MAX_SPREAD_TOKENS


def launch(config: dict[str, Any], arguments: Callable[..., tuple]) -> Launch:
    """The launch of a router gate; early where that hides more than it costs: not with many experts to a warp."""
    early = config["spread"] or bool(config["table"]) or config["num_experts"] <= MAX_EARLY_EXPERTS
    return Launch("moe.gate", config, arguments, pdl=early)


OPTIONAL = (
    *("bias", "image_bias", "image_token_mask", "mask", "fix_routing_mask", "force_random", "hash_table", "token_ids"),
    *("to_physical_map", "logical_count", "unmapped_topk_idx", "scores"),
)
"""The optional tensors, in the order of the kernel's arguments."""


def options(**tensors: Tensor | None) -> tuple[str, ...]:
    """The names of those that are present."""
    return tuple(name for name in OPTIONAL if tensors.get(name) is not None)


def arguments(
    ids: Tensor,
    weights: Tensor,
    logits: Tensor,
    factor: float,
    ep_rank: int,
    num_physical: int,
    ranks: tuple[int, int, int] = (1, 0, 1),
    /,
    **tensors: Tensor | None,
) -> tuple:
    """Run-time arguments of the kernel; ``ranks`` = experts per rank, tensor-parallel rank, number of those ranks."""
    given = (tensors.get(name) for name in OPTIONAL)
    return logits, *given, ids, weights, float(factor), ep_rank, num_physical, *ranks


def num_physical_experts(logits: Tensor, shared: int, to_physical_map: Tensor | None) -> int:
    """Physical experts over all ranks: every logical expert once, and the further copies that the map allows."""
    return logits.shape[1] + (shared if to_physical_map is None else to_physical_map.shape[1] - 1)


# -- inputs -----------------------------------------------------------------------------------------------------


def apart(logits: Tensor, bias: Tensor | None, scoring: str, num_topk: int, num_groups: int = 0) -> Tensor:
    """The logits with every row replaced whose choice hangs on nearly equal keys.

    There two correct implementations may choose differently, as their exponentials may differ in the last bits.
    """
    if logits.device.type == "meta" or not len(logits):
        return logits
    x = finite(logits).double()
    keys = (x if scoring == "softmax" else scores_of(x, scoring)) + (0 if bias is None else bias.double())
    best = keys.topk(min(num_topk + 1, keys.shape[1]), dim=1).values
    near = (best[:, :-1] - best[:, 1:] < 1e-5).any(1)
    if num_groups > 1:
        groups = keys.view(len(keys), num_groups, -1).topk(2, dim=2).values.sum(2).sort(dim=1).values
        near |= (groups[:, 1:] - groups[:, :-1] < 1e-5).any(1)
    clear = (~near).nonzero()[:, 0]
    row = torch.arange(len(logits), device=logits.device)
    logits[near] = logits[clear[row[near] % len(clear)]]
    return logits


def physical_map(make: Maker, logical: int, copies: int, num_physical: int) -> tuple[Tensor, Tensor]:
    """Map and counts: one to ``copies`` physical ids for every logical expert, with unused entries -1."""
    count = make.randint(1, copies + 1, logical, dtype=torch.int32)
    ids = make.randint(0, num_physical, logical, copies, dtype=torch.int32)
    if ids.device.type == "meta":
        return ids, count
    used = torch.arange(copies, device=ids.device) < count[:, None]
    return make.place(torch.where(used, ids, -1)), count
