"""vLLM 0.33: its C++ operators, its Triton and its TileLang kernels."""

import os

from tk_serving.bench.peers.vllm.gemm import skinny_gemm_fp8
from tk_serving.bench.peers.vllm.layer import experts, routing, shared_expert
from tk_serving.bench.peers.vllm.mhc import (
    mhc_head_fused,
    mhc_post,
    mhc_post_pre_fused,
    mhc_pre_big_fuse,
    mhc_pre_fused,
)
from tk_serving.bench.peers.vllm.moe import (
    expand_to_fused_and_cast,
    expand_to_fused_with_sf,
    get_block_mapping,
    get_fused_mapping,
    moe_topk_gate,
    reduce_fused,
    reduce_fused_add,
    top2_sum_gate,
)
from tk_serving.bench.peers.vllm.other import apply_rotary, apply_rotary_and_per_token_cast, engram_gate_fwd
from tk_serving.bench.peers.vllm.quant import (
    norm_forward,
    norm_forward_and_per_token_cast,
    per_token_cast,
    swiglu_forward,
    swiglu_forward_and_per_token_cast,
)

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

__all__ = [
    "apply_rotary",
    "apply_rotary_and_per_token_cast",
    "engram_gate_fwd",
    "expand_to_fused_and_cast",
    "expand_to_fused_with_sf",
    "experts",
    "get_block_mapping",
    "get_fused_mapping",
    "mhc_head_fused",
    "mhc_post",
    "mhc_post_pre_fused",
    "mhc_pre_big_fuse",
    "mhc_pre_fused",
    "moe_topk_gate",
    "norm_forward",
    "norm_forward_and_per_token_cast",
    "per_token_cast",
    "reduce_fused",
    "reduce_fused_add",
    "routing",
    "shared_expert",
    "skinny_gemm_fp8",
    "swiglu_forward",
    "swiglu_forward_and_per_token_cast",
    "top2_sum_gate",
]
