"""Reduction over the chosen experts behind SGLang's Triton experts (the default on Hopper)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving_patches import Function, Site
from tk_serving_patches.positions import constant, in_token_order
from tk_serving_sglang.sites._calls import on, plan

_OPERATORS = ("reduce_fused",)


def _moe_combine_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    def moe_combine_topk(
        intermediate_cache3: Tensor,
        out_hidden_states: Tensor,
        routed_scaling_factor: float | None,
        no_combine: bool = False,
        use_fused_moe_sum_all_reduce: bool = False,
        out_slice: Tensor | None = None,
        _use_intermediate: bool = True,
    ) -> Tensor:
        tokens, topk = intermediate_cache3.shape[:2]
        reason = None
        call: tuple[Any, ...] = ()
        if no_combine or use_fused_moe_sum_all_reduce:
            reason = "the rows are not added here"
        elif topk == 1 and not _use_intermediate:
            reason = "one expert, which wrote the result itself"
        elif not intermediate_cache3.is_contiguous():
            reason = "tensors with gaps"
        else:
            device, factor = intermediate_cache3.device, routed_scaling_factor
            positions = in_token_order(tokens, topk, device)
            weights = None if factor in (None, 1.0) else constant(float(factor or 1.0), tokens, topk, device)
            if positions is None or (weights is None and factor not in (None, 1.0)):
                reason = "the table of positions cannot grow during graph capture"
            else:
                call = (intermediate_cache3.view(tokens * topk, -1), weights, positions)
        options: dict[str, Any] = {"reason": reason, "tokens": tokens, "out": out_hidden_states}
        run = plan("routed-experts-triton", _OPERATORS, reduce_fused, *call, **options)
        if run is not None:
            run()
            return out_hidden_states
        return original(
            intermediate_cache3,
            out_hidden_states,
            routed_scaling_factor,
            no_combine,
            use_fused_moe_sum_all_reduce,
            out_slice,
            _use_intermediate,
        )

    return moe_combine_topk


SITES = (
    Site(
        name="routed-experts-triton",
        operators=_OPERATORS,
        patches=(
            Function("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe:moe_combine_topk", _moe_combine_topk),
        ),
        why="Sums and scales in f32 with one rounding, rows read once with wide loads.",
        how="The second product has applied the routing weights; here every row counts as much as the scaling factor. "
        "SGLang's Triton experts expand no rows.",
        until="SGLang lets experts choose their reduction.",
        sources={"0.5.23": "e0594e72a18d7d16"},
        unsuitable=on("cuda"),
    ),
)
