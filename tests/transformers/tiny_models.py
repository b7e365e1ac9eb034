"""Configurations of tiny models of every class, and the sites that each has."""

from typing import Any

VOCABULARY, EXPERTS, TOPK = 96, 16, 4

SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_experts_per_tok": TOPK,
    "n_routed_experts": EXPERTS,
    "max_position_embeddings": 128,
}
_LATENT = {
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", {**_LATENT, "topk_method": "greedy"}),
    "v2-groups": ("DeepseekV2", {**_LATENT, **_GROUPS, "topk_method": "group_limited_greedy"}),
    "v3": ("DeepseekV3", {**_LATENT, **_GROUPS}),
    "v3-plain": ("DeepseekV3", {**_LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "v32": ("DeepseekV32", {**_LATENT, **_GROUPS, "index_topk": 16, "index_head_dim": 32, "index_n_heads": 2}),
    "v4": (
        "DeepseekV4",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "sliding_window": 16,
            "swiglu_limit": 1.0,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        },
    ),
}
SITES = {  # the sites of each and how many modules they change
    "v2": {"routing": 1, "experts": 1, "swiglu": 2, "rms-norm": 9},
    "v2-groups": {"routing": 1, "experts": 1, "swiglu": 2, "rms-norm": 9},
    "v3": {"routing": 1, "experts": 1, "swiglu": 2, "rms-norm": 9},
    "v3-plain": {"routing": 1, "experts": 1, "swiglu": 2, "rms-norm": 9},
    "v32": {"routing": 1, "experts": 1, "swiglu": 2, "rms-norm": 9},
    "v4": {
        "routing": 2,
        "hash-routing": 1,
        "experts": 3,
        "swiglu": 3,
        "rms-norm": 16,
        "unweighted-rms-norm": 10,
        "mhc-pre": 6,
        "mhc-post": 3,
        "mhc-head": 1,
    },
}
