"""Tiny random models of every class, with experts that differ enough for the choice to be clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

VOCABULARY, EXPERTS, TOPK = 96, 16, 4

_SHARED = {
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


class Step(NamedTuple):
    """Results of one training step."""

    loss: Tensor
    logits: Tensor
    grads: dict[str, Tensor]


@pytest.fixture
def make() -> Callable[..., nn.Module]:
    """``make(name, dtype, head=...)``: a model of a config, equal for equal arguments."""

    def model(name: str, dtype: torch.dtype = torch.float32, head: str = "ForCausalLM", **overrides: Any) -> nn.Module:
        family, options = CONFIGS[name]
        config = getattr(transformers, f"{family}Config")(**{**_SHARED, **options, **overrides})
        torch.manual_seed(0)
        made = getattr(transformers, f"{family}{head}")(config)
        with torch.no_grad():
            for module in made.modules():
                if type(module).__name__.endswith("Router"):
                    module.weight.normal_(std=0.4)
                    if hasattr(module, "e_score_correction_bias"):
                        module.e_score_correction_bias.normal_(std=0.1)
                    if hasattr(module, "tid2eid"):
                        module.tid2eid.copy_(torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(VOCABULARY)]))
                elif hasattr(module, "gate_up_proj"):
                    module.gate_up_proj.normal_(std=0.2)  # some activations beyond the limit
        return made.to(dtype)

    return model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def step(tokens: Tensor) -> Callable[[nn.Module], Step]:
    """One forward and backward pass; the gradients are taken away from the model."""

    def run(model: nn.Module) -> Step:
        out = model(input_ids=tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return Step(out.loss.detach(), out.logits.detach(), grads)

    return run
