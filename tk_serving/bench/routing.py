"""Steps of a layer whose operators take the results of the ones before: our side of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall
from tk_serving.operator import find


def routing(gate: dict[str, Any], mapping: dict[str, Any], expand: dict[str, Any]) -> PeerCall:
    """The router, ``get_fused_mapping`` of its choices, and ``expand_to_fused_and_cast`` by that mapping."""
    choose = find(router(gate)).public
    place, spread = (find(name).public for name in ("get_fused_mapping", "expand_to_fused_and_cast"))

    def run() -> tuple:
        ids, weights = choose(**gate)
        pos_to_expert, _, _, positions, *_ = place(**{**mapping, "topk_idx": ids})
        rows = spread(**{**expand, "token_topk_to_pos": positions, "pos_to_expert": pos_to_expert})
        return ids, weights, positions, rows

    return PeerCall(run, lambda found: by_pair(*found))


def experts(
    mapping: dict[str, Any], expand: dict[str, Any], swiglu: dict[str, Any], reduce: dict[str, Any]
) -> PeerCall:
    """``get_fused_mapping``, and by its results expansion, SwiGLU with cast, and reduction.

    The rows that SwiGLU and reduction read are those of the layer's matrix products, and given.
    """
    names = ("get_fused_mapping", "expand_to_fused_with_sf", "swiglu_forward_and_per_token_cast", "reduce_fused_add")
    place, spread, activate, join = (find(name).public for name in names)

    def run() -> tuple:
        owners, _, pairs, positions, *_ = place(**mapping)
        rows = spread(**{**expand, "token_topk_to_pos": positions, "pos_to_expert": owners})
        quantised = activate(**{**swiglu, "pos_to_token_topk": pairs, "pos_to_expert": owners})
        return positions, rows, quantised, join(**{**reduce, "token_topk_to_pos": positions})

    return PeerCall(run, lambda found: by_pair(mapping["topk_idx"], swiglu["topk_weights"], *found[:2]))


def router(gate: dict[str, Any]) -> str:
    """Name of the gate that takes these arguments."""
    return "top2_sum_gate" if "num_groups" in gate else "moe_topk_gate"


def by_pair(ids: Tensor, weights: Tensor, positions: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """What both sides must agree on, whatever their order inside an expert.

    Returns:
        The ids of each token in ascending order, and for each of them the weight, the row and its scales.
    """
    order = ids.long().argsort(dim=1)
    at = positions.long().gather(1, order)
    data, sf = rows
    codes = data.view(torch.uint8)[at].view(data.dtype)
    return ids.long().gather(1, order), weights.gather(1, order), codes, sf[at].contiguous()
