"""Router gate with group-limited top-k."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving.expect import Expect, short
from tk_serving.moe import _gating
from tk_serving.moe.mask_indices_by_tp import mask_indices_by_tp
from tk_serving.operator import Out, Plan, operator
from tk_serving.workloads import Maker, Model, serving, variants

_expect = Expect("top2_sum_gate")


def _plan(
    logits: Tensor,
    bias: Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: Tensor | None,
    fix_routing_mask: Tensor | None,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
    unmapped_topk_idx: Tensor | None,
    int32_ids: bool,
) -> Plan:
    tokens, experts, shared = _gating.check(
        _expect,
        logits=logits,
        num_topk=num_topk,
        use_shared_as_routed=use_shared_as_routed,
        num_shared_experts=num_shared_experts,
        ep_rank=ep_rank,
        scoring_func=scoring_func,
        to_physical_map=to_physical_map,
        logical_count=logical_count,
        unmapped_topk_idx=unmapped_topk_idx,
        fix_routing_mask=fix_routing_mask,
        masks={"mask": mask, "fix_routing_mask": fix_routing_mask},
        biases={"bias": bias},
    )
    grouped = _check_groups(experts, num_topk, num_topk_groups, num_groups)
    physical = _gating.num_physical_experts(logits, shared, to_physical_map)
    _expect.between("num_ep_ranks", num_ep_ranks, 1, physical)
    _expect.between("ep_rank", ep_rank, 0, num_ep_ranks - 1)
    _expect.at_least("num_tp_ranks", num_tp_ranks, 1)
    _expect.between("tp_rank", tp_rank, 0, num_tp_ranks - 1)
    config = {
        "num_experts": experts,
        "num_topk": num_topk,
        "num_shared": shared,
        "scoring": scoring_func,
        "num_groups": num_groups if grouped else 1,
        "num_kept": num_topk_groups if grouped else 1,
        "fold": False,
        "local": True,
        "table": "",
        "token_ids": "",
        "options": _gating.options(
            bias=bias,
            mask=mask,
            fix_routing_mask=fix_routing_mask,
            to_physical_map=to_physical_map,
            logical_count=logical_count,
            unmapped_topk_idx=unmapped_topk_idx,
        ),
        "spread": _gating.is_spread(tokens),
        "logits_dtype": short(logits.dtype),
        "ids_dtype": "int32" if int32_ids else "int64",
    }
    shape = (tokens, num_topk + shared)
    launches = (_gating.launch(config, _arguments),) if tokens else ()
    ids_dtype = torch.int32 if int32_ids else torch.int64
    return Plan((Out(shape, ids_dtype), Out(shape, torch.float32)), launches)


def _check_groups(experts: int, num_topk: int, num_topk_groups: int, num_groups: int) -> bool:
    """Check the groups; whether they restrict the choice."""
    _expect.at_least("num_groups", num_groups, 0)
    if num_groups == 0:
        _expect.that(num_topk_groups == 0, "num_topk_groups", "0, as num_groups is 0", num_topk_groups)
        return False
    _expect.that(experts % num_groups == 0, "num_groups", f"a divisor of the {experts} experts", num_groups)
    _expect.between("num_topk_groups", num_topk_groups, 1, num_groups)
    if num_topk_groups == num_groups:
        return False
    size = experts // num_groups
    _expect.that(num_groups <= 32, "num_groups", "at most 32 groups to choose from", num_groups)
    _expect.that(2 <= size <= 32, "num_groups", "groups of 2 to 32 experts", f"{num_groups} groups of {size}")
    _expect.that(
        num_topk <= num_topk_groups * size,
        "num_topk",
        f"at most {num_topk_groups * size} experts of the kept groups",
        num_topk,
    )
    return True


def _arguments(
    out: Sequence[Tensor],
    logits: Tensor,
    bias: Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: Tensor | None,
    fix_routing_mask: Tensor | None,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
    unmapped_topk_idx: Tensor | None,
    int32_ids: bool,
) -> tuple:
    shared = num_shared_experts if use_shared_as_routed else 0
    physical = _gating.num_physical_experts(logits, shared, to_physical_map)
    return _gating.arguments(
        out[0],
        out[1],
        logits,
        routed_scaling_factor,
        ep_rank,
        physical,
        (physical // num_ep_ranks, tp_rank, num_tp_ranks),
        bias=bias,
        mask=mask,
        fix_routing_mask=fix_routing_mask,
        to_physical_map=to_physical_map,
        logical_count=logical_count,
        unmapped_topk_idx=unmapped_topk_idx,
    )


def _verify(logits: Tensor, *arguments: Any) -> None:
    fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx = arguments[-5:-1]
    _gating.verify(_expect, logits, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    experts: int,
    topk: int,
    groups: int = 0,
    kept: int = 0,
    scoring: str = "sigmoid",
    factor: float = 2.5,
    shared: int = 0,
    copies: int = 0,
    masked: bool = False,
    fixed: bool = False,
    ep: int = 1,
    tp: int = 1,
    special: bool = False,
    int32_ids: bool = False,
    bf16: bool = False,
) -> tuple:
    bias = make.randn(experts, scale=0.1)
    dtype = torch.bfloat16 if bf16 else torch.float32
    logits = _gating.apart(make.randn(tokens, experts, dtype=dtype), bias, scoring, topk, groups)
    if special and logits.device.type != "meta":
        logits[0] = float("nan")
        logits[1, 3:] = -float("inf")
        logits[2, ::2] = float("inf")
    unmapped = make.randint(-2, experts + 2, tokens, topk) if fixed else None
    map_and_count: tuple[Tensor | None, Tensor | None] = (None, None)
    if copies:
        map_and_count = _gating.physical_map(make, experts + shared, copies, experts + copies - 1)
    return (
        *(logits, bias, topk, kept, groups, shared > 0, shared, factor),
        *(ep - 1, ep, tp - 1, tp, scoring),
        make.randint(0, 3, tokens).bool() if masked else None,
        make.randint(0, 2, tokens).bool() if fixed else None,
        *map_and_count,
        unmapped,
        int32_ids,
    )


def _engine_forms(model: Model) -> list[dict]:
    """For models with groups: vLLM's with either dtype of logits, with and without padding rows to leave out; SGLang's
    with a shared expert among the routed ones."""
    if not model.n_group:
        return []
    sizes = {"experts": model.n_routed_experts, "topk": model.num_experts_per_tok, "groups": model.n_group}
    fixed = {**sizes, "kept": model.topk_group, "scoring": model.scoring_func, "int32_ids": True}
    forms = [{**fixed, "bf16": bf16, "masked": masked} for bf16 in (False, True) for masked in (False, True)]
    return [*forms, {**fixed, "shared": model.n_shared_experts}]


@operator(
    spec="operators.md P19",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    mutates=["unmapped_topk_idx"],
    equality=_gating.Routing(),
    cases=[
        {"tokens": 0, "experts": 256, "topk": 8, "groups": 8, "kept": 4},
        {"tokens": 33, "experts": 256, "topk": 8, "groups": 8, "kept": 4},
        {
            "tokens": 3,
            "experts": 256,
            "topk": 8,
            "groups": 8,
            "kept": 4,
            "masked": True,
            "int32_ids": True,
            "bf16": True,
        },
        {
            "tokens": 9,
            "experts": 72,
            "topk": 6,
            "scoring": "sqrtsoftplus",
            "shared": 1,
            "copies": 3,
            "masked": True,
            "fixed": True,
        },
        {
            "tokens": 9,
            "experts": 60,
            "topk": 4,
            "groups": 4,
            "kept": 1,
            "scoring": "softmax",
            "tp": 2,
            "ep": 4,
            "shared": 2,
        },
        {"tokens": 5, "experts": 40, "topk": 32, "special": True, "groups": 20, "kept": 16},
        {"tokens": 5, "experts": 33, "topk": 3, "special": True, "scoring": "softmax", "copies": 2, "ep": 2},
        # One warp for each token.
        {"tokens": 515, "experts": 64, "topk": 6, "groups": 8, "kept": 4, "special": True},
        {"tokens": 513, "experts": 60, "topk": 4, "groups": 4, "kept": 1, "scoring": "softmax", "tp": 2, "ep": 4},
    ],
    workloads=serving(
        lambda m: {
            "experts": m.n_routed_experts,
            "topk": m.num_experts_per_tok,
            "groups": m.n_group,
            "kept": m.topk_group,
            "scoring": m.scoring_func,
            "factor": m.routed_scaling_factor,
        }
    ),
    variants=variants(_engine_forms),
    peers=["vllm", "sglang"],
)
def top2_sum_gate(
    logits: Tensor,
    bias: Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    *,
    int32_ids: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token, from the best groups of experts where groups are given.

    Experts rank by score + bias (softmax: logit + bias), groups by the sum of their two largest ranks; ties go to the
    lower id. The weights are the scores without bias, divided by their sum and scaled. Infinite logits count as the
    largest finite value, NaN as the lowest.

    Args:
        logits: float32 (or bfloat16, taken as float32) [T, R], contiguous, R <= 4096.
        bias: float32 [R].
        num_topk: K routed experts of a token, K <= R; at most 32 slots with the shared ones.
        num_topk_groups: groups kept; equal to num_groups, or both 0, for a choice without groups.
        num_groups: groups of R / num_groups experts (2 to 32) each, at most 32.
        use_shared_as_routed: append slots with the ids R, R + 1, ... and weight 1 for the shared experts.
        num_shared_experts: S of these slots, 1 or 2.
        routed_scaling_factor: multiplies the normalised weights of the routed experts.
        ep_rank: number of this expert-parallel rank; decides which copies of an expert its tokens use.
        num_ep_ranks: expert-parallel ranks.
        tp_rank: number of this tensor-parallel rank.
        num_tp_ranks: tensor-parallel ranks; ids of experts that other ranks hold become -1, their weights stay.
        scoring_func: ``sigmoid``, ``sqrtsoftplus`` or ``softmax``.
        mask: bool [T]; False marks tokens without experts: ids -1, weights 0.
        fix_routing_mask: bool [T]; True takes the logical ids from ``unmapped_topk_idx``. Ids outside [0, R) there
            become -1 with weight 0.
        to_physical_map: int32 [R + S, Dup]: physical ids of every logical expert; needs Dup > S.
        logical_count: int32 [R + S]: number of valid entries in each row of the map.
        unmapped_topk_idx: int64 [T, K], rows may be strided: receives the logical ids of the routed experts.
        int32_ids: return the ids as int32, which serving engines read.

    Returns:
        Ids, int64 (or int32) [T, K + S], and weights, float32 [T, K + S].

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout, value or combination.
    """
    experts, shared = logits.shape[1], num_shared_experts if use_shared_as_routed else 0
    x = _gating.finite(logits)
    scores = _gating.scores_of(x, scoring_func)
    keys = (x if scoring_func == "softmax" else scores) + bias
    allowed = _gating.best_groups(keys, num_groups, num_topk_groups) if num_topk_groups < num_groups else None
    ids = _gating.choose(keys, allowed, num_topk)
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        ids = torch.where(fix_routing_mask[:, None], _gating.within(unmapped_topk_idx, experts), ids)
        unmapped_topk_idx.copy_(torch.where(fix_routing_mask[:, None], unmapped_topk_idx, ids))
    elif unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(ids)

    chosen = _gating.scores_at(scores, ids)
    total = torch.full_like(chosen[:, 0], _gating.TINY)
    for k in range(num_topk):
        total = total + chosen[:, k]
    weights = chosen / total[:, None] * routed_scaling_factor

    ids, weights = _gating.with_shared(ids, weights, experts, shared)
    if to_physical_map is not None and logical_count is not None:
        ids = _gating.physical(ids, to_physical_map, logical_count, ep_rank)
    physical = _gating.num_physical_experts(logits, shared, to_physical_map)
    ids = mask_indices_by_tp.operator.reference(ids, physical, num_ep_ranks, tp_rank, num_tp_ranks)
    if mask is not None:
        ids = torch.where(mask[:, None], ids, -1)
        weights = torch.where(mask[:, None], weights, 0.0)
        if unmapped_topk_idx is not None:
            unmapped_topk_idx.copy_(torch.where(mask[:, None], unmapped_topk_idx, -1))
    return ids.int() if int32_ids else ids, weights
