"""Routing, mapping, expand and reduce of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, PeerUnavailableError, covers, need, nothing_else
from tk_serving.bench.peers.vllm.quant import FP8, per_token_cast
from tk_serving.moe.get_block_mapping import capacity, in_order

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
UNWRITTEN = "calls that leave padding rows as they are"


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
    **rest: Any,
) -> PeerCall:
    """``_moe_C.grouped_topk``; the Triton gate of DeepSeek-V4 without groups."""
    covers(not use_shared_as_routed and num_ep_ranks == num_tp_ranks == 1, "one rank and routed experts")
    nothing_else(rest)
    if scoring_func == "sqrtsoftplus" and num_groups == num_topk_groups:
        return _dsv4_topk(logits, bias, num_topk, routed_scaling_factor)
    covers(scoring_func == "sigmoid", "sigmoid scores")
    ops = need("vllm._custom_ops")
    groups, kept = max(num_groups, 1), max(num_topk_groups, 1)
    return PeerCall(
        lambda: ops.grouped_topk(logits, groups, kept, num_topk, True, routed_scaling_factor, bias, 1), _ids_first
    )


def moe_topk_gate(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    bias: Tensor | None = None,
    hash_table: Tensor | None = None,
    token_ids: Tensor | None = None,
    **rest: Any,
) -> PeerCall:
    """The Triton gate of DeepSeek-V4; ``_moe_C.topk_softplus_sqrt`` for layers routed by a table."""
    covers(scoring_func == "sqrtsoftplus" and not use_shared_as_routed, "sqrtsoftplus scores of routed experts")
    nothing_else(rest)
    if hash_table is None or token_ids is None:
        zeros = torch.zeros(logits.shape[1], device=logits.device)
        return _dsv4_topk(logits, zeros if bias is None else bias, num_topk, routed_scaling_factor)
    ops = need("vllm._custom_ops")
    shape, device = (logits.shape[0], num_topk), logits.device
    table, tokens = hash_table.int(), token_ids.int()
    weights, ids = torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device)
    sources = torch.empty_like(ids)

    def run() -> tuple[Tensor, Tensor]:
        ops.topk_hash_softplus_sqrt(weights, ids, sources, logits, True, routed_scaling_factor, None, tokens, table)
        return weights, ids

    return PeerCall(run, _ids_first)


def get_fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> PeerCall:
    """``_moe_C.moe_align_block_size``."""
    ops = need("vllm._custom_ops")
    ids, device = topk_idx.int(), topk_idx.device
    rows = ids.numel() + num_experts * (alignment - 1)
    sorted_ids = torch.empty(rows, dtype=torch.int32, device=device)
    experts = torch.empty(-(-rows // alignment), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    return PeerCall(
        lambda: ops.moe_align_block_size(ids, num_experts, alignment, sorted_ids, experts, count),
        None,
        "delivers sorted pair numbers and the expert of each block, no positions of the pairs",
    )


def get_block_mapping(
    topk_idx: Tensor, num_experts: int, block_size: int, expert_map: Tensor | None = None
) -> PeerCall:
    """``_moe_C.moe_align_block_size``, into tensors that are there already."""
    ops = need("vllm._custom_ops")
    rows, device = capacity(topk_idx.numel(), num_experts, block_size), topk_idx.device
    sizes = rows, -(-rows // block_size), 1
    sorted_ids, experts, count = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    return PeerCall(
        lambda: ops.moe_align_block_size(topk_idx, num_experts, block_size, sorted_ids, experts, count, expert_map),
        lambda _: in_order(sorted_ids, experts, count, block_size),
        "any order among the pairs of an expert",
    )


def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    zero_padding: bool = True,
) -> PeerCall:
    """The Triton scatter of the DeepGEMM path (``ep_scatter``)."""
    covers(not zero_padding, UNWRITTEN)
    covers(x[0].dtype == FP8 and x[1].dtype == torch.float32, "e4m3 with f32 scales")
    return _scatter(lambda: x, num_per_channels, token_topk_to_pos, pos_to_expert)


def expand_to_fused_and_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    zero_padding: bool = True,
) -> PeerCall:
    """The group cast, then ``ep_scatter``."""
    covers(not zero_padding, UNWRITTEN)
    covers(not use_packed_ue8m0, "f32 scales")
    cast = per_token_cast(x, fmt, num_per_channels, None, False, round_sf)
    return _scatter(cast.run, num_per_channels, token_topk_to_pos, pos_to_expert)


def reduce_fused(
    x: Any,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> PeerCall:
    """The Triton gather of the DeepGEMM path (``ep_gather``)."""
    covers(isinstance(x, Tensor) and not fp8_format and sf is None, "plain rows in, plain rows out")
    utils = need(f"{FUSED_MOE}.deep_gemm_utils")
    tokens, topk = token_topk_to_pos.shape
    valid = torch.where(token_topk_to_pos >= 0, 0, -1).int()
    weights = topk_weights if topk_weights is not None else torch.ones(tokens, topk, device=x.device)
    target = torch.empty(tokens, x.shape[1], dtype=x.dtype, device=x.device)
    return PeerCall(lambda: utils.ep_gather(x, valid, weights, token_topk_to_pos, None, target), lambda _: target)


def reduce_fused_add(
    x: Any, shared: Tensor, topk_weights: Tensor | None, token_topk_to_pos: Tensor, out: Tensor | None = None
) -> PeerCall:
    """``ep_gather``, then the sum with the output of the shared expert."""
    routed = reduce_fused(x, topk_weights, token_topk_to_pos)
    total = torch.empty_like(shared)

    def run() -> Tensor:
        routed.run()
        return torch.add(routed.result(None) if routed.result else shared, shared, out=total)

    return PeerCall(run)


def _dsv4_topk(logits: Tensor, bias: Tensor, num_topk: int, factor: float) -> PeerCall:
    covers(num_topk == 6 and logits.shape[1] in (256, 384), "6 of 256 or 384 experts")
    router = need(f"{FUSED_MOE}.router.dsv4_topk")
    return PeerCall(lambda: router.dsv4_topk(logits, bias, torch.int32, factor), _ids_first)


def _ids_first(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    weights, ids = result
    return ids.long(), weights


def _scatter(
    source: Callable[[], tuple[Tensor, Tensor]], group: int, token_topk_to_pos: Tensor, pos_to_expert: Tensor
) -> PeerCall:
    utils = need(f"{FUSED_MOE}.deep_gemm_utils")
    data, sf = source()
    covers(data.shape[1] % group == 0, "whole scale groups")
    experts, ids = _expert_ids(token_topk_to_pos, pos_to_expert)
    rows, device = pos_to_expert.shape[0], data.device
    counts = torch.bincount(ids[ids >= 0].long(), minlength=experts).int()
    out = torch.empty(rows, data.shape[1], dtype=data.dtype, device=device)
    out_sf = torch.empty(rows, sf.shape[1], dtype=sf.dtype, device=device)
    start = torch.empty(experts, dtype=torch.int32, device=device)
    indices = torch.empty(-(-rows // 128) * 128, dtype=torch.int32, device=device)
    index = torch.empty_like(ids)

    def run() -> None:
        buffers = (ids, counts, None, start, out, out_sf.zero_(), indices, index)  # as deepgemm_moe_permute
        utils.ep_scatter(*source(), *buffers, 128, group)

    def result(_: Any) -> tuple[Tensor, Tensor]:
        # Its order inside an expert is that of its atomics; its padding rows are not written.
        placed, placed_sf = torch.zeros_like(out), torch.zeros_like(out_sf)
        valid = token_topk_to_pos >= 0
        target, found = token_topk_to_pos[valid].long(), index[valid].long()
        placed.view(torch.uint8)[target] = out.view(torch.uint8)[found]
        placed_sf[target] = out_sf[found]
        return placed, placed_sf

    return PeerCall(run, result, "assigns the positions as well; row-major scales")


def _expert_ids(token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> tuple[int, Tensor]:
    """Number of experts and the expert of each pair, from the mapping."""
    experts = int(pos_to_expert.max()) + 1
    if experts < 1:
        raise PeerUnavailableError("no pair has a position")
    ids = pos_to_expert[token_topk_to_pos.clamp(min=0).long()]
    return experts, torch.where(token_topk_to_pos >= 0, ids, -1).int()
