"""The order of (token, expert) pairs in blocks of rows, which vLLM's Marlin and Triton experts read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tk_serving.moe.get_block_mapping import MAX_PAIRS, get_block_mapping, in_order
from tk_serving_patches import Function, Site, warm
from tk_serving_vllm.sites._calls import on, plan

_OPERATORS = ("get_block_mapping",)
_SITE = "expert-blocks"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"


def _moe_align_block_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``moe_align_block_size``: Marlin's and Triton's experts, and others that take the same order."""

    def moe_align_block_size(
        topk_ids: Tensor,
        block_size: int,
        num_experts: int,
        expert_map: Tensor | None = None,
        pad_sorted_ids: bool = False,
        ignore_invalid_experts: bool = False,
        return_scatter_idx: bool = False,
    ) -> Any:
        tokens, topk = topk_ids.shape
        form = (topk, topk_ids.dtype, num_experts, expert_map is not None)
        # The profiling run has more pairs than the operator takes.
        warm.note_made((_SITE, form), functools.partial(_of_tokens, form))
        reason = None
        if tokens * topk > MAX_PAIRS:
            reason = f"more than {MAX_PAIRS} pairs"
        elif pad_sorted_ids or return_scatter_idx:
            reason = "rows padded to whole blocks" if pad_sorted_ids else "an index of the routed rows"
        elif expert_map is not None and not ignore_invalid_experts:
            reason = "rows for experts of other ranks"
        call = (topk_ids, num_experts, block_size, expert_map)
        run = plan(_SITE, tokens, get_block_mapping, *call, reason=reason)
        if run is not None:
            return run()
        flags = (pad_sorted_ids, ignore_invalid_experts, return_scatter_idx)
        return original(topk_ids, block_size, num_experts, expert_map, *flags)

    return moe_align_block_size


def _of_tokens(form: tuple[Any, ...], tokens: int) -> Iterator[tuple[Any, tuple, dict[str, Any]]]:
    """The call for so many tokens, on meta tensors."""
    topk, dtype, num_experts, mapped = form
    if tokens * topk <= MAX_PAIRS:
        ids = torch.empty(tokens, topk, dtype=dtype, device="meta")
        local = torch.empty(num_experts, dtype=torch.int32, device="meta") if mapped else None
        yield get_block_mapping, (ids, num_experts, 1, local), {}  # its kernels take blocks of any size


def _in_order(result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The pairs of an expert in ascending order, which vLLM's atomics leave open; a block has at most E rows."""
    rows, experts, used, *_ = result
    return in_order(rows, experts, used, -(-len(rows) // max(len(experts), 1)))


SITES = (
    Site(
        name=_SITE,
        operators=_OPERATORS,
        patches=(
            Function(
                f"{_FUSED_MOE}.moe_align_block_size:moe_align_block_size",
                _moe_align_block_size,
                relies_on=("vllm._custom_ops:moe_align_block_size",),
                in_order=_in_order,
            ),
        ),
        why="One launch in place of two in front of the experts' products, and the same order in every run.",
        how=f"Takes up to {MAX_PAIRS} pairs, with and without experts of other ranks; more of them, padded rows and "
        "the index of routed rows stay with vLLM. So does Triton's path for very few pairs, which needs no order.",
        until="vLLM's kernel is one launch for few pairs.",
        sources={"0.33.0": "7ba900d1acc6e36c"},
        unsuitable=on("cuda"),
    ),
)
