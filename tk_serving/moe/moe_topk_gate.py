"""Router gate without groups: biased top-k, or expert ids from a table of token ids."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving.expect import Expect, short
from tk_serving.moe import _contents, _gating
from tk_serving.operator import Existing, Out, Plan, Quantized, operator
from tk_serving.workloads import Maker, Model, serving, variants

_expect = Expect("moe_topk_gate")


def _plan(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str,
    mask: Tensor | None,
    bias: Tensor | None,
    image_bias: Tensor | None,
    image_token_mask: Tensor | None,
    fix_routing_mask: Tensor | None,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
    unmapped_topk_idx: Tensor | None,
    force_random: Tensor | None,
    out: Quantized | None,
    scores: Tensor | None,
    hash_table: Tensor | None,
    token_ids: Tensor | None,
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
        masks={
            "mask": mask,
            "image_token_mask": image_token_mask,
            "fix_routing_mask": fix_routing_mask,
            "force_random": force_random,
        },
        biases={"bias": bias, "image_bias": image_bias},
    )
    _expect.together(image_bias=image_bias, image_token_mask=image_token_mask)
    _check_table(tokens, num_topk, hash_table, token_ids, fix_routing_mask)
    shape = (tokens, num_topk + shared)
    ids_dtype = torch.int32 if int32_ids else torch.int64
    results: tuple[Out | Existing, ...] = (Out(shape, ids_dtype), Out(shape, torch.float32))
    if out is not None:
        _expect.same("out[0]", out[0], shape, ids_dtype)
        _expect.same("out[1]", out[1], shape, torch.float32)
        results = (Existing("out", 0), Existing("out", 1))
    if scores is not None:
        _expect.same("scores", scores, (tokens, experts), torch.float32)
    given = out or (None, None)
    _expect.same_device(
        logits=logits, out=given[0], out_weights=given[1], scores=scores, hash_table=hash_table, token_ids=token_ids
    )
    config = {
        "num_experts": experts,
        "num_topk": num_topk,
        "num_shared": shared,
        "scoring": scoring_func,
        "num_groups": 1,
        "num_kept": 1,
        "fold": True,
        "local": False,
        "table": "" if hash_table is None else str(hash_table.dtype).removeprefix("torch."),
        "token_ids": "" if token_ids is None else str(token_ids.dtype).removeprefix("torch."),
        "options": _gating.options(
            **_biases(bias, image_bias, image_token_mask, hash_table),
            mask=mask,
            fix_routing_mask=fix_routing_mask,
            force_random=force_random,
            hash_table=hash_table,
            token_ids=token_ids,
            to_physical_map=to_physical_map,
            logical_count=logical_count,
            unmapped_topk_idx=unmapped_topk_idx,
            scores=scores,
        ),
        "spread": hash_table is None and _gating.is_spread(tokens),
        "logits_dtype": short(logits.dtype),
        "ids_dtype": "int32" if int32_ids else "int64",
    }
    return Plan(results, (_gating.launch(config, _arguments),) if tokens else ())


def _check_table(
    tokens: int, num_topk: int, hash_table: Tensor | None, token_ids: Tensor | None, fix_routing_mask: Tensor | None
) -> None:
    _expect.together(hash_table=hash_table, token_ids=token_ids)
    if hash_table is None or token_ids is None:
        return
    integers = (torch.int64, torch.int32)
    _expect.that(fix_routing_mask is None, "fix_routing_mask", "None, as hash_table gives the ids", "a tensor")
    rows = _expect.tensor("hash_table", hash_table, integers, ("V", num_topk))[0]
    _expect.that(rows > 0, "hash_table", "at least one row", rows)
    _expect.tensor("token_ids", token_ids, integers, (tokens,))


def _biases(
    bias: Tensor | None, image_bias: Tensor | None, image_token_mask: Tensor | None, hash_table: Tensor | None
) -> dict[str, Tensor | None]:
    """The biases that the kernel reads: none where a table gives the ids."""
    if hash_table is not None:
        return {}
    return {"bias": bias, "image_bias": image_bias, "image_token_mask": image_token_mask}


def _arguments(
    results: Sequence[Tensor],
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str,
    mask: Tensor | None,
    bias: Tensor | None,
    image_bias: Tensor | None,
    image_token_mask: Tensor | None,
    fix_routing_mask: Tensor | None,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
    unmapped_topk_idx: Tensor | None,
    force_random: Tensor | None,
    out: Quantized | None,
    scores: Tensor | None,
    hash_table: Tensor | None,
    token_ids: Tensor | None,
    int32_ids: bool,
) -> tuple:
    shared = num_shared_experts if use_shared_as_routed else 0
    return _gating.arguments(
        results[0],
        results[1],
        logits,
        routed_scaling_factor,
        ep_rank,
        _gating.num_physical_experts(logits, shared, to_physical_map),
        **_biases(bias, image_bias, image_token_mask, hash_table),
        mask=mask,
        fix_routing_mask=fix_routing_mask,
        force_random=force_random,
        hash_table=hash_table,
        token_ids=token_ids,
        to_physical_map=to_physical_map,
        logical_count=logical_count,
        unmapped_topk_idx=unmapped_topk_idx,
        scores=scores,
    )


def _finish(flat: tuple[Tensor, Tensor], *arguments: object) -> tuple[Tensor, Tensor]:
    out = arguments[16]
    return flat if out is None else (out[0], out[1])  # type: ignore[index]


def _verify(logits: Tensor, *arguments: Any) -> None:
    fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx = arguments[10:14]
    _gating.verify(_expect, logits, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx)
    hash_table, token_ids = arguments[-3:-1]
    if hash_table is not None:
        _contents.below(_expect, "hash_table", hash_table, logits.shape[1])
        _contents.below(_expect, "token_ids", token_ids, len(hash_table))


def _inputs(
    make: Maker,
    *,
    tokens: int,
    experts: int,
    topk: int,
    scoring: str = "sqrtsoftplus",
    factor: float = 1.5,
    biased: bool = True,
    image: bool = False,
    shared: int = 0,
    copies: int = 0,
    masked: bool = False,
    fixed: bool = False,
    random: bool = False,
    preallocated: bool = False,
    with_scores: bool = False,
    vocabulary: int = 0,
    table_dtype: torch.dtype = torch.int64,
    token_dtype: torch.dtype | None = None,
    special: bool = False,
    int32_ids: bool = False,
    bf16: bool = False,
) -> tuple:
    bias = make.randn(experts, scale=0.1) if biased else None
    dtype = torch.bfloat16 if bf16 else torch.float32
    logits = _gating.apart(make.randn(tokens, experts, dtype=dtype), bias, scoring, topk)
    image_bias = make.randn(experts, scale=0.1) if image else None
    if special and logits.device.type != "meta":
        logits[0] = float("nan")
        logits[1, 3:] = -float("inf")
        logits[2, ::2] = float("inf")
    map_and_count: tuple[Tensor | None, Tensor | None] = (None, None)
    if copies:
        map_and_count = _gating.physical_map(make, experts + shared, copies, experts + copies - 1)

    def rows(chance: int) -> Tensor:
        return make.randint(0, chance, tokens).bool()

    slots = (tokens, topk + shared)
    return (
        *(logits, topk, shared > 0, shared, factor, 3, scoring),
        rows(4) if masked else None,
        bias,
        image_bias,
        rows(2) if image else None,
        rows(2) if fixed else None,
        *map_and_count,
        make.randint(-2, experts + 2, tokens, topk) if fixed or copies else None,
        rows(3) if random else None,
        (make.randint(0, 9, *slots), make.rand(*slots)) if preallocated else None,
        make.rand(tokens, experts) if with_scores else None,
        make.randint(-1, experts + 1, vocabulary, topk, dtype=table_dtype) if vocabulary else None,
        make.randint(-1, vocabulary + 1, tokens, dtype=token_dtype or table_dtype) if vocabulary else None,
        int32_ids,
    )


def _engine_forms(model: Model) -> list[dict]:
    """By score and bias, V4.1's also for images, and by a table of token ids, which are int64 in SGLang; with and
    without padding rows to leave out."""
    if model.scoring_func != "sqrtsoftplus":
        return []
    sizes = {"experts": model.n_routed_experts, "topk": model.num_experts_per_tok, "int32_ids": True}
    table = {"biased": False, "vocabulary": model.vocab_size, "table_dtype": torch.int32}
    forms: list[dict] = [{}, table, *([{"image": True}] if model.quant_group == 32 else [])]
    masked = [{**sizes, **form, "masked": masked} for form in forms for masked in (False, True)]
    return [*masked, {**sizes, **table, "token_dtype": torch.int64}]


@operator(
    spec="operators.md A1",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    verify=_verify,
    finish=_finish,
    mutates=["unmapped_topk_idx", "out", "scores"],
    equality=_gating.Routing(),
    aliases=["moe_topk_gate_forward"],
    cases=[
        {"tokens": 0, "experts": 384, "topk": 6},
        {"tokens": 33, "experts": 384, "topk": 6},
        {
            "tokens": 9,
            "experts": 72,
            "topk": 6,
            "shared": 1,
            "copies": 3,
            "masked": True,
            "fixed": True,
            "with_scores": True,
        },
        {"tokens": 20, "experts": 64, "topk": 6, "image": True, "random": True, "preallocated": True, "copies": 2},
        {"tokens": 9, "experts": 256, "topk": 6, "biased": False, "vocabulary": 50},
        {"tokens": 9, "experts": 256, "topk": 6, "masked": True, "int32_ids": True, "bf16": True},
        {
            "tokens": 9,
            "experts": 48,
            "topk": 3,
            "vocabulary": 50,
            "table_dtype": torch.int32,
            "masked": True,
            "shared": 2,
        },
        {
            "tokens": 5,
            "experts": 33,
            "topk": 31,
            "special": True,
            "scoring": "softmax",
            "biased": False,
            "with_scores": True,
        },
        {"tokens": 5, "experts": 40, "topk": 4, "special": True, "scoring": "sigmoid", "image": True, "biased": False},
        # One warp for each token.
        {
            "tokens": 515,
            "experts": 72,
            "topk": 6,
            "shared": 1,
            "copies": 3,
            "masked": True,
            "fixed": True,
            "with_scores": True,
        },
        {
            "tokens": 513,
            "experts": 40,
            "topk": 4,
            "scoring": "softmax",
            "image": True,
            "random": True,
            "with_scores": True,
            "special": True,
        },
    ],
    workloads=serving(
        lambda m: {
            "experts": m.n_routed_experts,
            "topk": m.num_experts_per_tok,
            "scoring": m.scoring_func,
            "factor": m.routed_scaling_factor,
        }
    ),
    variants=variants(_engine_forms),
    peers=["vllm", "sglang", "tile_kernels"],
)
def moe_topk_gate(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    force_random: Tensor | None = None,
    out: Quantized | None = None,
    scores: Tensor | None = None,
    *,
    hash_table: Tensor | None = None,
    token_ids: Tensor | None = None,
    int32_ids: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token by score + bias (softmax: logit + bias), or take them from a table.

    The weights are the scores without bias, divided by their sum and scaled. Ties go to the lower id. Infinite logits
    count as the largest finite value, NaN as the lowest.

    Args:
        logits: float32 (or bfloat16, taken as float32) [T, R], contiguous, R <= 4096.
        num_topk: K routed experts of a token, K <= R; at most 32 slots with the shared ones.
        use_shared_as_routed: append slots with the ids R, R + 1, ... and weight 1 for the shared experts.
        num_shared_experts: S of these slots, 1 or 2.
        routed_scaling_factor: multiplies the normalised weights of the routed experts.
        ep_rank: number of this expert-parallel rank; decides which copies of an expert its tokens use.
        scoring_func: ``sqrtsoftplus``, ``sigmoid`` or ``softmax``.
        mask: bool [T]; False marks tokens without experts: ids -1, weights 0.
        bias: float32 [R].
        image_bias: float32 [R], in place of ``bias`` for the rows of ``image_token_mask``.
        image_token_mask: bool [T].
        fix_routing_mask: bool [T]; True takes the logical ids from ``unmapped_topk_idx``. Ids outside [0, R) there
            become -1 with weight 0.
        to_physical_map: int32 [R + S, Dup]: physical ids of every logical expert; needs Dup > S.
        logical_count: int32 [R + S]: number of valid entries in each row of the map.
        unmapped_topk_idx: int64 [T, K], rows may be strided: receives the logical ids of the routed experts.
        force_random: bool [T], for load tests: distinct pseudo-random physical ids and weights in [0, 1).
        out: preallocated results.
        scores: float32 [T, R]: receives the scores, 0 for masked and random rows.
        hash_table: int32 or int64 [V, K]: logical ids by token id; replaces the choice by scores. Ids outside [0, R)
            become -1 with weight 0, as do all ids of a token outside [0, V).
        token_ids: int32 or int64 [T]: the rows of ``hash_table``.
        int32_ids: return the ids as int32, which serving engines read.

    Returns:
        Ids, int64 (or int32) [T, K + S], and weights, float32 [T, K + S].

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout, value or combination.
    """
    tokens, experts = logits.shape
    shared = num_shared_experts if use_shared_as_routed else 0
    x = _gating.finite(logits)
    all_scores = _gating.scores_of(x, scoring_func)
    live = torch.ones(tokens, dtype=torch.bool, device=logits.device) if mask is None else mask
    if hash_table is not None and token_ids is not None:
        known = (token_ids >= 0) & (token_ids < len(hash_table))
        rows = hash_table[torch.where(known, token_ids, 0).long()].long()
        ids = torch.where(known[:, None], _gating.within(rows, experts), -1)
    else:
        keys = x if scoring_func == "softmax" else all_scores
        if image_bias is not None and image_token_mask is not None:
            text_bias = torch.zeros_like(image_bias) if bias is None else bias
            keys = keys + torch.where(image_token_mask[:, None], image_bias, text_bias)
        elif bias is not None:
            keys = keys + bias
        ids = _gating.choose(keys, None, num_topk)
    unmapped = ids
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        ids = torch.where(fix_routing_mask[:, None], _gating.within(unmapped_topk_idx, experts), ids)
        unmapped = torch.where(fix_routing_mask[:, None], unmapped_topk_idx, ids)

    chosen = _gating.scores_at(all_scores, ids)
    fold = torch.nn.functional.pad(chosen, (0, 32 - num_topk))
    for distance in (16, 8, 4, 2, 1):
        fold = fold[:, :distance] + fold[:, distance : 2 * distance]
    weights = chosen / (fold + _gating.TINY) * routed_scaling_factor

    ids, weights = _gating.with_shared(ids, weights, experts, shared)
    if to_physical_map is not None and logical_count is not None:
        ids = _gating.physical(ids, to_physical_map, logical_count, ep_rank)
    if force_random is not None:
        physical = _gating.num_physical_experts(logits, shared, to_physical_map)
        drawn = (live & force_random)[:, None]
        some_ids, some_weights = _gating.draw(tokens, num_topk + shared, ep_rank, physical, logits.device)
        ids, weights = torch.where(drawn, some_ids, ids), torch.where(drawn, some_weights, weights)
        routed = live & ~force_random
    else:
        routed = live
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(torch.where(routed[:, None], unmapped, -1))
    if scores is not None:
        scores.copy_(torch.where(routed[:, None], all_scores, 0.0))
    ids = torch.where(live[:, None], ids, -1)
    return ids.int() if int32_ids else ids, torch.where(live[:, None], weights, 0.0)
