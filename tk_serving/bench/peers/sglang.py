"""SGLang 0.5.23: its CUDA, Triton and TileLang kernels."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, covers, need, nothing_else

FP8 = torch.float8_e4m3fn
_KERNELS = "sglang.kernels.ops"


def per_token_cast(
    x: Any,
    fmt: str,
    num_per_channels: int,
    x_block_size: Any = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    **rest: Any,
) -> PeerCall:
    """``sglang_per_token_group_quant_fp8``; its amax floor is 1e-10."""
    covers(isinstance(x, Tensor) and x.dtype == torch.bfloat16 and fmt == "e4m3", "bf16 to e4m3")
    covers(x.is_contiguous(), "contiguous rows")
    nothing_else(rest)
    covers(use_packed_ue8m0 or not round_sf, "rounded scales in packed form")
    column = use_tma_aligned_col_major_sf
    cast = need(f"{_KERNELS}.quantization.fp8_kernel").sglang_per_token_group_quant_fp8
    return PeerCall(
        lambda: cast(
            x,
            num_per_channels,
            column_major_scales=column,
            scale_tma_aligned=column,
            scale_ue8m0=use_packed_ue8m0,
        )
    )


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    sf_clamp_min: float | None = None,
    zero_padding: bool = True,
    **rest: Any,
) -> PeerCall:
    """``silu_and_mul_contig_post_quant``; on Hopper a second kernel brings the scales into columns."""
    covers(x.dtype == torch.bfloat16 and num_per_channels == 128, "bf16 in groups of 128")
    covers(not round_sf, "scales without rounding")
    nothing_else({**rest, "clamped_count": clamped_count, "sf_clamp_min": sf_clamp_min})
    less = []
    if topk_weights is not None:
        less.append("multiplies by the routing weights in its reduction instead")
    if pos_to_expert is not None:
        less.append("also computes padding rows")
    cast = need(f"{_KERNELS}.activation.silu_and_mul_clamp").silu_and_mul_contig_post_quant
    align = need(f"{_KERNELS}.moe.ep_moe_kernels").tma_align_input_scale
    rows, hidden = x.shape[0], x.shape[1] // 2
    data = torch.empty(rows, hidden, dtype=FP8, device=x.device)
    sf = torch.empty(rows, hidden // num_per_channels, device=x.device)

    def run() -> tuple[Tensor, Tensor]:
        cast(x, data, sf, num_per_channels, swiglu_limit=swiglu_clamp_value)
        return data, align(sf) if use_tma_aligned_col_major_sf else sf

    return PeerCall(run, None, ", ".join(less)) if less else PeerCall(run)


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
    """The Triton router ``moe_fused_gate``."""
    covers(not use_shared_as_routed and num_ep_ranks == num_tp_ranks == 1, "one rank and routed experts")
    nothing_else(rest)
    return _fused_gate(
        logits, bias, num_topk, routed_scaling_factor, scoring_func, max(num_groups, 1), max(num_topk_groups, 1)
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
    """The Triton router ``moe_fused_gate``; ``hash_topk`` for layers routed by a table."""
    covers(not use_shared_as_routed, "routed experts")
    nothing_else(rest)
    if hash_table is None or token_ids is None:
        zeros = torch.zeros(logits.shape[1], device=logits.device)
        return _fused_gate(logits, zeros if bias is None else bias, num_topk, routed_scaling_factor, scoring_func)
    covers(scoring_func == "sqrtsoftplus", "sqrtsoftplus scores")
    route = need(f"{_KERNELS}.moe.dsv4").hash_topk
    table, tokens = hash_table.int(), token_ids
    return PeerCall(lambda: route(logits, tokens, table, routed_scaling_factor=routed_scaling_factor), _ids_first)


def reduce_fused(
    x: Any,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> PeerCall:
    """The Triton gather of the DeepEP path (``ep_gather``)."""
    covers(isinstance(x, Tensor) and not fp8_format and sf is None, "plain rows in, plain rows out")
    gather = need(f"{_KERNELS}.moe.ep_moe_kernels").ep_gather
    tokens, topk = token_topk_to_pos.shape
    valid = torch.where(token_topk_to_pos >= 0, 0, -1).int()
    weights = topk_weights if topk_weights is not None else torch.ones(tokens, topk, device=x.device)
    target = torch.empty(tokens, x.shape[1], dtype=x.dtype, device=x.device)
    return PeerCall(lambda: gather(x, valid, weights, token_topk_to_pos, target), lambda _: target)


def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
    **rest: Any,
) -> PeerCall:
    """``mhc_pre``."""
    nothing_else(rest)
    pre = _layer("mhc").mhc_pre
    eps = (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps)
    return PeerCall(lambda: pre(residual, fn, mhc_scale, mhc_base, *eps, mhc_post_mult_value, sinkhorn_repeat))


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> PeerCall:
    """``mhc_post``."""
    covers(residual.dim() == 3 and residual.is_contiguous(), "contiguous [T, 4, H] residuals")
    post = _layer("mhc").mhc_post
    return PeerCall(lambda: post(x, residual, post_layer_mix, comb_res_mix))


def mhc_pre_fused(residual: Tensor, norm_weight: Tensor | None = None, norm_eps: float = 1e-6, **rest: Any) -> PeerCall:
    """``mhc_pre`` with the norm inside, then the group cast."""
    covers(residual.dim() == 3 and not rest["delayed"], "[T, 4, H] residuals, not delayed")
    pre = _layer("mhc").mhc_pre
    mixer, norm = _mixer(rest), {"norm_weight": norm_weight, "norm_eps": norm_eps}

    def run() -> tuple:
        post, comb, x = pre(residual, *mixer, **norm)
        return post, comb, x, _cast(x, rest)

    return PeerCall(run, lambda result: _layer_input(result, rest))


def mhc_post_pre_fused(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    **rest: Any,
) -> PeerCall:
    """``mhc_fused_post_pre`` with the norm inside, then the group cast."""
    covers(residual.dim() == 3 and not rest["delayed"], "[T, 4, H] residuals, not delayed")
    both = _layer("mhc").mhc_fused_post_pre
    mixer, norm = _mixer(rest), {"norm_weight": norm_weight, "norm_eps": norm_eps}

    def run() -> tuple:
        streams, post, comb, out = both(x, residual, post_layer_mix, comb_res_mix, *mixer, **norm)
        return streams, post, comb, out, _cast(out, rest)

    return PeerCall(run, lambda result: (result[0], *_layer_input(result[1:], rest)))


def mhc_head_fused(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    n_splits: int = 16,
    fn_norm_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> PeerCall:
    """``fused_hc_head``."""
    covers(residual.dim() == 3 and norm_weight is None, "[T, 4, H] residuals without a final norm")
    nothing_else({"fn_norm_weight": fn_norm_weight})
    head = _layer("mhc_head").fused_hc_head
    return PeerCall(lambda: head(residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps))


def engram_gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
) -> PeerCall:
    """``fused_engram_gate``."""
    covers(image_token_mask is None, "calls without image tokens")
    gate = need(f"{_KERNELS}.embeddings.engram_gate").fused_engram_gate
    kv = torch.cat([k.reshape(k.shape[0], -1), v], dim=1)
    weight, ones = weight_fused.bfloat16(), torch.ones_like(weight_fused, dtype=torch.bfloat16)
    return PeerCall(
        lambda: gate(hidden_states, kv, weight, ones, eps, clamp_value),
        lambda out: (out, None, None, None, None),
        "bf16 norm weights; saves nothing for a backward pass",
    )


def _layer(module: str) -> Any:
    """A module whose kernels ask for the configuration of a server and a group of one rank."""
    found = need(f"{_KERNELS}.layernorm.{module}")
    publish("cuda" if torch.cuda.is_available() else "cpu")
    return found


@functools.cache
def publish(device: str, **options: Any) -> None:
    """What SGLang's kernels ask for outside an engine: a published configuration and a group of one rank."""
    from sglang.srt import runtime_context, server_args
    from sglang.srt.distributed import bootstrap

    arguments = server_args.ServerArgs(model_path="dummy", device=device, **options)
    arguments.resolve_once()
    ranks = runtime_context.SpawnRanks(
        world_rank=runtime_context.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
    )
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    port = 20_000 + os.getpid() % 20_000  # processes that start at the same time must not meet
    bootstrap.init_parallel_runtime(server_args=arguments, device=device, dist_port=port)


def _mixer(arguments: dict[str, Any]) -> list[Any]:
    names = ("fn", "mhc_scale", "mhc_base", "rms_eps", "mhc_pre_eps", "mhc_sinkhorn_eps")
    return [arguments[name] for name in (*names, "mhc_post_mult_value", "sinkhorn_repeat")]


def _cast(x: Tensor, cast: dict[str, Any]) -> Any:
    if cast["fmt"] is None:
        return None
    flags = (cast["use_tma_aligned_col_major_sf"], cast["round_sf"], cast["use_packed_ue8m0"])
    return per_token_cast(x, cast["fmt"], cast["num_per_channels"], None, *flags).run()


def _layer_input(result: tuple, cast: dict[str, Any]) -> tuple:
    post, comb, x, quantised = result
    kept = x if quantised is None or cast["with_out_bf16"] else None
    return post.view(-1, 4, 1), comb.view(-1, 4, 4), kept, quantised, None


def _fused_gate(
    logits: Tensor, bias: Tensor, num_topk: int, factor: float, scoring_func: str, groups: int = 1, kept: int = 1
) -> PeerCall:
    gate = need(f"{_KERNELS}.moe.moe_fused_gate").moe_fused_gate
    options: dict[str, Any] = {
        "scoring_func": scoring_func,
        "routed_scaling_factor": factor,
        "apply_routed_scaling_factor_on_output": True,
        "num_expert_group": groups,
        "topk_group": kept,
    }
    return PeerCall(lambda: gate(logits, bias, num_topk, **options), _ids_first)


def _ids_first(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    weights, ids = result
    return ids.long(), weights
