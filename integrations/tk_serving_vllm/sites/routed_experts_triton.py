"""Reduction over the chosen experts behind vLLM's Triton experts (block FP8, bf16) and Marlin experts (FP4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving_patches import Function, Site
from tk_serving_vllm.sites._calls import on, plan

_OPERATORS = ("reduce_fused",)
_positions: dict[torch.device, Tensor] = {}


def _position_table(tokens: int, topk: int, device: torch.device) -> Tensor | None:
    """[T, K] with entry t * K + k: vLLM's rows are in token order. None if it would have to grow during capture."""
    table = _positions.get(device)
    if table is None or table.numel() < tokens * topk:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        table = _positions[device] = torch.arange(max(tokens * topk, 1 << 16), dtype=torch.int32, device=device)
    return table[: tokens * topk].view(tokens, topk)


def _moe_sum(site: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def moe_sum(
            self: Any, input: Tensor, output: Tensor, topk_ids: Tensor | None = None, expert_map: Tensor | None = None
        ) -> None:
            tokens, topk, hidden = input.shape
            call: tuple[Any, ...] = ()
            reason = None
            if expert_map is not None:
                reason = "expert parallelism: rows of other ranks are not written"
            else:
                positions = _position_table(tokens, topk, input.device)
                if positions is None:
                    reason = "the table of positions cannot grow during graph capture"
                else:
                    call = (input.view(tokens * topk, hidden), None, positions)
            run = plan(site, tokens, reduce_fused, *call, reason=reason, out=output)
            if run is None:
                original(self, input, output, topk_ids, expert_map)
            else:
                run()

        return moe_sum

    return make


def _site(name: str, target: str, how: str, source: str) -> Site:
    return Site(
        name=name,
        operators=_OPERATORS,
        patches=(Function(f"vllm.model_executor.layers.fused_moe.experts.{target}.moe_sum", _moe_sum(name)),),
        why="Sums in f32 with one rounding, rows read once with wide loads.",
        how=how,
        until="vLLM lets experts choose their reduction.",
        sources={"0.33.0": source},
        unsuitable=on("cuda"),
    )


SITES = (
    _site(
        "routed-experts-triton",
        "triton_moe:TritonExperts",
        "The second product has applied the weights, so they are 1 here. Triton's experts expand no rows; their "
        "SwiGLU is the site swiglu, or swiglu-quant for FP8.",
        "ee962cd8a82926e1",
    ),
    _site(
        "routed-experts-marlin",
        "marlin_moe:MarlinExperts",
        "As behind Triton's experts; their SwiGLU is the site swiglu-clamp.",
        "956e3fb2a185ce31",
    ),
)
