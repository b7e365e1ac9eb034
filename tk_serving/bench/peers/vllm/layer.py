"""Steps of a decoder layer that vLLM cuts differently; named by the chains."""

from __future__ import annotations

from typing import Any

import torch

from tk_serving.bench.peers import PeerCall, need
from tk_serving.bench.peers.vllm import moe
from tk_serving.bench.peers.vllm.quant import FP8, FP8_UTILS, layout, per_token_cast, swiglu_forward
from tk_serving.bench.routing import by_pair, router


def routing(gate: dict[str, Any], mapping: dict[str, Any], expand: dict[str, Any]) -> PeerCall:
    """The router, the group cast, and the permutation of the DeepGEMM path."""
    utils = need(f"{moe.FUSED_MOE}.deep_gemm_utils")
    choose = getattr(moe, router(gate))(**gate)
    x, experts = expand["x"], mapping["num_experts"]
    cast = per_token_cast(x, expand["fmt"], expand["num_per_channels"], None, False, expand["round_sf"])

    def run() -> tuple:
        weights, ids = choose.run()
        data, sf = cast.run()
        return weights, ids, utils.deepgemm_moe_permute(data, sf, ids, experts, None, None, use_psum_layout=True)

    def result(found: tuple) -> tuple:
        weights, ids, (data, sf, _, positions, _) = found
        return by_pair(ids, weights, positions, (data, sf))

    return PeerCall(run, result)


def experts(
    mapping: dict[str, Any], expand: dict[str, Any], swiglu: dict[str, Any], reduce: dict[str, Any]
) -> PeerCall:
    """The DeepGEMM path: permute, SwiGLU with cast on the live rows, weighted unpermute, sum with the shared expert."""
    utils = need(f"{moe.FUSED_MOE}.deep_gemm_utils")
    cast = need(FP8_UTILS).silu_mul_per_token_group_quant_fp8_colmajor
    data, sf = expand["x"]
    ids, count = mapping["topk_idx"].int(), mapping["num_experts"]
    weights = swiglu["topk_weights"]
    gate_up, down = swiglu["x"], reduce["x"]
    output = torch.empty(ids.shape[0], down.shape[1], dtype=down.dtype, device=down.device)
    group, clamp, rounded = swiglu["num_per_channels"], swiglu["swiglu_clamp_value"], swiglu["round_sf"]

    def run() -> Any:
        moved = utils.deepgemm_moe_permute(data, sf, ids, count, None, None, use_psum_layout=True)
        ends, inverse, alignment = moved[2:]
        quantised = cast(
            gate_up, None, rounded, clamp_limit=clamp, group_size=group, expert_ends=ends, expert_alignment=alignment
        )
        utils.deepgemm_unpermute_and_reduce(down, ids, weights, inverse, None, output)
        return moved, quantised, output.add_(reduce["shared"])

    def result(found: tuple) -> tuple:
        (rows, scales, _, positions, _), *_ = found
        return by_pair(ids, weights, positions, (rows, scales))

    return PeerCall(run, result)


def shared_expert(swiglu: dict[str, Any]) -> PeerCall:
    """One fused kernel without a clamp; activation with the clamp, then the group cast."""
    x, group, clamp = swiglu["x"], swiglu["num_per_channels"], swiglu["swiglu_clamp_value"]
    ops = need("vllm._custom_ops")
    if clamp is None:
        return PeerCall(lambda: ops.silu_and_mul_per_block_quant(x, group, FP8, None, True))
    activation = swiglu_forward(x, "bf16", clamp)
    cast = per_token_cast(activation.run(), "e4m3", group, None, *layout(swiglu))

    def run() -> Any:
        activation.run()
        return cast.run()

    return PeerCall(run)
