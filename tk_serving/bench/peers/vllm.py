"""vLLM 0.33: its C++ operators, its Triton and its TileLang kernels."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, PeerUnavailableError, covers, need, nothing_else

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

FP8 = torch.float8_e4m3fn
FLOOR = 1e-4  # our amax floor; vLLM's default is 1e-10
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"


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
    """``_C.per_token_group_fp8_quant`` or its packed form; ``_C.dynamic_per_token_scaled_fp8_quant`` for whole rows."""
    covers(isinstance(x, Tensor) and x.dtype == torch.bfloat16 and fmt == "e4m3", "bf16 to e4m3")
    nothing_else(rest)
    if num_per_channels == x.shape[1] and num_per_channels > 256:
        covers(not round_sf, "whole rows without rounding")
        ops = need("vllm._custom_ops")
        return PeerCall(lambda: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True))
    utils = need("vllm.model_executor.layers.quantization.utils.fp8_utils")
    if use_packed_ue8m0:
        packed = utils.per_token_group_quant_fp8_packed_for_deepgemm
        return PeerCall(lambda: packed(x, num_per_channels, FLOOR, use_ue8m0=True))
    column = use_tma_aligned_col_major_sf
    cast = utils.per_token_group_quant_fp8
    return PeerCall(lambda: cast(x, num_per_channels, FLOOR, FP8, column, column, use_ue8m0=round_sf))


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
    **rest: Any,
) -> PeerCall:
    """The Triton kernels of the DeepGEMM path (packed, column-major), else ``_C.silu_and_mul_per_block_quant``."""
    covers(x.dtype == torch.bfloat16 and num_per_channels in (32, 64, 128), "bf16 in groups of 32 to 128")
    nothing_else({**rest, "clamped_count": clamped_count, "sf_clamp_min": sf_clamp_min})
    less = []
    if topk_weights is not None:
        less.append("multiplies by the routing weights in its reduction instead")
    if pos_to_expert is not None:
        less.append("also computes padding rows")
    utils = need("vllm.model_executor.layers.quantization.utils.fp8_utils")
    if use_packed_ue8m0:
        run = lambda: utils.silu_mul_quant_fp8_packed_triton(x, num_per_channels, clamp_limit=swiglu_clamp_value)  # noqa: E731
    elif use_tma_aligned_col_major_sf:
        covers(x.shape[0] % 128 == 0, "column-major scales for multiples of 128 rows")
        column = utils.silu_mul_per_token_group_quant_fp8_colmajor
        run = lambda: column(x, None, round_sf, FLOOR, swiglu_clamp_value, num_per_channels)  # noqa: E731
    else:
        covers(not round_sf and swiglu_clamp_value is None, "row-major scales without rounding and clamping")
        ops = need("vllm._custom_ops")
        run = lambda: ops.silu_and_mul_per_block_quant(x, num_per_channels, FP8)  # noqa: E731
    return PeerCall(run, None, ", ".join(less)) if less else PeerCall(run)


def swiglu_forward(x: Tensor, fmt: str, clamp_value: float | None = None, **rest: Any) -> PeerCall:
    """``_C.silu_and_mul`` or ``_C.silu_and_mul_with_clamp``."""
    covers(x.dtype == torch.bfloat16 and fmt == "bf16", "bf16")
    nothing_else(rest)
    need("vllm._custom_ops")
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)

    def run() -> Tensor:
        if clamp_value is None:
            torch.ops._C.silu_and_mul(out, x)
        else:
            torch.ops._C.silu_and_mul_with_clamp(out, x, clamp_value)
        return out

    return PeerCall(run)


def norm_forward(x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None, **rest: Any) -> PeerCall:
    """``_C.rms_norm`` or ``_C.fused_add_rms_norm``."""
    covers(x.dim() == 2 and weight is not None, "two dimensions with a weight")
    covers(rest.pop("out_scale", 1.0) == 1.0, "out_scale 1")
    nothing_else(rest)
    ops = need("vllm._custom_ops")
    if residual is None:
        out = torch.empty_like(x)
        return PeerCall(lambda: ops.rms_norm(out, x, weight, eps), lambda _: (out, None, x))
    own_x, own_residual = x.clone(), residual.clone()  # written in place
    return PeerCall(
        lambda: ops.fused_add_rms_norm(own_x, own_residual, weight, eps), lambda _: (own_x, None, own_residual)
    )


def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    **rest: Any,
) -> PeerCall:
    """``_C.rms_norm_per_block_quant``, or the norm followed by the group cast where it does not apply."""
    covers(x.dim() == 2 and weight is not None and out_scale == 1.0, "two dimensions with a weight and out_scale 1")
    nothing_else(rest)
    ops = need("vllm._custom_ops")
    if not round_sf and num_per_channels in (64, 128) and not with_out_bf16:
        own = residual.clone() if residual is not None else None
        aligned = 4 if use_tma_aligned_col_major_sf else 0
        group = [1, num_per_channels]
        return PeerCall(
            lambda: ops.rms_norm_per_block_quant(
                x, weight, eps, FP8, group, None, own, use_tma_aligned_col_major_sf, aligned
            ),
            lambda cast: (cast, None, None, x if own is None else own),
            "one amax floor lower than ours",
        )
    norm = norm_forward(x, weight, eps, residual)
    normed = norm.result(None)[0] if norm.result else x
    flags = (None, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    cast = per_token_cast(normed, fmt, num_per_channels, *flags)

    def run() -> Any:
        norm.run()
        return cast.run()

    def result(quantised: Any) -> tuple:
        out, _, norm_input = norm.result(None) if norm.result else (x, None, x)
        return quantised, out if with_out_bf16 else None, None, norm_input

    return PeerCall(run, result)


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


def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> PeerCall:
    """The Triton scatter of the DeepGEMM path (``ep_scatter``)."""
    data, sf = x
    covers(data.dtype == FP8 and sf.dtype == torch.float32, "e4m3 with f32 scales")
    covers(data.shape[1] % num_per_channels == 0, "whole scale groups")
    utils = need(f"{_FUSED_MOE}.deep_gemm_utils")
    experts, ids = _expert_ids(token_topk_to_pos, pos_to_expert)
    rows, device = pos_to_expert.shape[0], data.device
    counts = torch.bincount(ids[ids >= 0].long(), minlength=experts).int()
    out = torch.empty(rows, data.shape[1], dtype=data.dtype, device=device)
    out_sf = torch.empty(rows, sf.shape[1], dtype=sf.dtype, device=device)
    start = torch.empty(experts, dtype=torch.int32, device=device)
    indices = torch.empty(-(-rows // 128) * 128, dtype=torch.int32, device=device)
    index = torch.empty_like(ids)

    def result(_: Any) -> tuple[Tensor, Tensor]:
        # Its order inside an expert is that of its atomics; its padding rows are not written.
        placed, placed_sf = torch.zeros_like(out), torch.zeros_like(out_sf)
        valid = token_topk_to_pos >= 0
        target, source = token_topk_to_pos[valid].long(), index[valid].long()
        placed.view(torch.uint8)[target] = out.view(torch.uint8)[source]
        placed_sf[target] = out_sf[source]
        return placed, placed_sf

    return PeerCall(
        lambda: utils.ep_scatter(
            data, sf, ids, counts, None, start, out, out_sf, indices, index, 128, num_per_channels
        ),
        result,
        "assigns the positions as well, row-major scales, padding rows unwritten",
    )


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
    utils = need(f"{_FUSED_MOE}.deep_gemm_utils")
    tokens, topk = token_topk_to_pos.shape
    valid = torch.where(token_topk_to_pos >= 0, 0, -1).int()
    weights = topk_weights if topk_weights is not None else torch.ones(tokens, topk, device=x.device)
    target = torch.empty(tokens, x.shape[1], dtype=x.dtype, device=x.device)
    return PeerCall(lambda: utils.ep_gather(x, valid, weights, token_topk_to_pos, None, target), lambda _: target)


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
    """``mhc_pre_tilelang``: DeepGEMM's TF32 pre-norm GEMM, then one TileLang kernel."""
    nothing_else(rest)
    mhc = need("vllm.model_executor.kernels.mhc.tilelang")
    eps = (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps)
    shape = residual.shape[:-2]
    return PeerCall(
        lambda: mhc.mhc_pre_tilelang(residual, fn, mhc_scale, mhc_base, *eps, mhc_post_mult_value, sinkhorn_repeat),
        lambda r: (r[0].view(*shape, 4, 1), r[1].view(*shape, 4, 4), r[2]),
    )


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> PeerCall:
    """``mhc_post_tilelang``."""
    covers(residual.is_contiguous(), "contiguous residuals")
    mhc = need("vllm.model_executor.kernels.mhc.tilelang")
    return PeerCall(lambda: mhc.mhc_post_tilelang(x, residual, post_layer_mix, comb_res_mix))


mhc_post_fwd = mhc_post


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
    """The Triton kernel behind ``Engram.forward``, after the kv projection."""
    engram, triton = need("vllm.models.deepseek_v41.common.engram"), need("triton")
    tokens, streams, dim = hidden_states.shape
    kv = torch.cat([k.reshape(tokens, -1), v], dim=1)
    ones = torch.ones_like(weight_fused)
    mask = hidden_states if image_token_mask is None else ~image_token_mask
    block = triton.next_power_of_2(dim)
    output = torch.empty_like(hidden_states)

    def run() -> Tensor:
        engram._fused_engram_post_wkv_kernel[(tokens * streams,)](
            *(hidden_states, kv, weight_fused, ones, mask, output, tokens),
            *(*hidden_states.stride(), *kv.stride(), *weight_fused.stride(), *ones.stride()),
            *(0 if image_token_mask is None else 1, *output.stride(), eps, clamp_value),
            DIM=dim,
            HC_MULT=streams,
            BLOCK_SIZE=block,
            HAS_MASK=image_token_mask is not None,
            num_warps=8 if block >= 2048 else 4,
        )
        return output

    note = "saves nothing for a backward pass" if save_for_backward else ""
    return PeerCall(run, lambda out: (out, None, None, None, None), note)


def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> PeerCall:
    """``_C.rotary_embedding``, with the cache in the dtype of the query as the engine keeps it."""
    covers(query.dim() == 3 and positions is not None and seqlen_offset == 0, "[T, heads, rot] with positions")
    ops = need("vllm._custom_ops")
    assert positions is not None
    cache, rows = cos_sin_cache.to(query.dtype), positions.long()
    tail = (0, True) if conjugate else ()
    return PeerCall(
        lambda: ops.rotary_embedding(rows, query, key, query.shape[-1], cache, not interleaved, *tail),
        note="angles rounded to the dtype of the query",
    )


def _dsv4_topk(logits: Tensor, bias: Tensor, num_topk: int, factor: float) -> PeerCall:
    covers(num_topk == 6 and logits.shape[1] in (256, 384), "6 of 256 or 384 experts")
    router = need(f"{_FUSED_MOE}.router.dsv4_topk")
    return PeerCall(lambda: router.dsv4_topk(logits, bias, torch.int32, factor), _ids_first)


def _ids_first(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    weights, ids = result
    return ids.long(), weights


def _expert_ids(token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> tuple[int, Tensor]:
    """Number of experts and the expert of each pair, from the mapping."""
    experts = int(pos_to_expert.max()) + 1
    if experts < 1:
        raise PeerUnavailableError("no pair has a position")
    ids = pos_to_expert[token_topk_to_pos.clamp(min=0).long()]
    return experts, torch.where(token_topk_to_pos >= 0, ids, -1).int()


# -- steps of a decoder layer that vLLM runs as one ---------------------------------------------------------------


def experts(
    mapping: dict[str, Any], expand: dict[str, Any], swiglu: dict[str, Any], reduce: dict[str, Any]
) -> PeerCall:
    """The DeepGEMM path: permute, SwiGLU with cast on the live rows, unpermute with the routing weights."""
    utils = need(f"{_FUSED_MOE}.deep_gemm_utils")
    cast = need("vllm.model_executor.layers.quantization.utils.fp8_utils").silu_mul_per_token_group_quant_fp8_colmajor
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
        return moved, quantised

    return PeerCall(run)


def shared_expert(swiglu: dict[str, Any]) -> PeerCall:
    """One fused kernel without a clamp; activation with the clamp, then the group cast."""
    x, group, clamp = swiglu["x"], swiglu["num_per_channels"], swiglu["swiglu_clamp_value"]
    ops = need("vllm._custom_ops")
    if clamp is None:
        return PeerCall(lambda: ops.silu_and_mul_per_block_quant(x, group, FP8, None, True))
    activation = swiglu_forward(x, "bf16", clamp)
    cast = per_token_cast(activation.run(), "e4m3", group, None, *_layout(swiglu))

    def run() -> Any:
        activation.run()
        return cast.run()

    return PeerCall(run)


def mhc_boundary(post: dict[str, Any], pre: dict[str, Any], norm: dict[str, Any]) -> PeerCall:
    """``mhc_fused_post_pre_tilelang`` with the norm inside, then the group cast."""
    mhc = need("vllm.model_executor.kernels.mhc.tilelang")
    boundary = (post["x"], post["residual"], post["post_layer_mix"], post["comb_res_mix"])
    mixer = (pre["fn"], pre["mhc_scale"], pre["mhc_base"], pre["rms_eps"], pre["mhc_pre_eps"], pre["mhc_sinkhorn_eps"])
    rest = (pre["mhc_post_mult_value"], pre["sinkhorn_repeat"])
    options = {"norm_weight": norm["weight"], "norm_eps": norm["eps"]}

    def run() -> Any:
        result = mhc.mhc_fused_post_pre_tilelang(*boundary, *mixer, *rest, **options)
        return result, per_token_cast(result[3], norm["fmt"], norm["num_per_channels"], None, *_layout(norm)).run()

    return PeerCall(run)


def _layout(arguments: dict[str, Any]) -> tuple[bool, bool, bool]:
    """The scale layout of a cast, in the order of the arguments."""
    return arguments["use_tma_aligned_col_major_sf"], arguments["round_sf"], arguments["use_packed_ue8m0"]
