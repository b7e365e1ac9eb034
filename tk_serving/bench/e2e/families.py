"""From the name of a GPU kernel to what it is for."""

from __future__ import annotations

import re

FAMILIES = (
    ("routed experts", r"fused_moe_kernel|marlin_moe|Marlin|grouped|GemmType\)[12]|moe_wna16|^lossless"),
    ("attention", r"flash|mla|attn|paged|sparse_|swa|[rR]ope|rotary|concat_and_cache|kv_insert|splitkv"),
    (
        "mhc",
        r"mhc|hc_head|hc_prenorm|prenorm_gemm|norm_fn|apply_mix|big_fuse|^pre_kernel|^head_mix|post_kernel|"
        r"^expand_kernel|hyper",
    ),
    ("routing", r"topk|top_k|gate_kernel|dsv4_topk|moe_align|count_and_sort|fused_mapping|block_mapping|expand"),
    ("swiglu", r"act_and_mul|silu|swiglu"),
    ("casts", r"group_quant|per_token_cast|quant_8bit|scaled_fp8_quant|per_token_group"),
    ("reduce", r"moe_sum|reduce_fused"),
    ("norms", r"rms_norm|RMSNorm|layer_norm|norm_forward"),
    ("FP8 linear layers", r"sm90_fp8_gemm|skinny_gemm"),
    ("dense products", r"nvjet|gemm|cutlass|cublas|splitKreduce|ll_bf16|router_gemm"),
    ("copies", r"Memcpy|Memset|copy_kernel|elementwise|vectorized|gather|index|fill|cat_|CatArray"),
    ("compiled", r"triton_"),
)
"""Families in the order in which they are tried; the rest is ``other``."""


def family(kernel: str) -> str:
    """The family of a kernel by its name."""
    return next((name for name, pattern in FAMILIES if re.search(pattern, kernel)), "other")


def by_family(kernels: dict[str, float]) -> dict[str, float]:
    """Milliseconds by family, the largest first, from milliseconds by kernel name."""
    total: dict[str, float] = {}
    for kernel, ms in kernels.items():
        total[family(kernel)] = total.get(family(kernel), 0.0) + ms
    return {name: round(ms, 4) for name, ms in sorted(total.items(), key=lambda item: -item[1])}
