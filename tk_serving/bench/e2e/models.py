"""Configurations of real models with few layers: the published shapes of a layer, as the checkpoints spell them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_VOCABULARY = 129280
_COMMON = {
    "vocab_size": _VOCABULARY,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 0,
}


def _yarn(factor: float, original: int, **more: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
        **more,
    }


def _v3(layers: int) -> dict[str, Any]:
    """DeepSeek-V3: the first layer is dense."""
    return {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "rope_scaling": _yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0),
        "quantization_config": _FP8,
    }


def _v32(layers: int) -> dict[str, Any]:
    """DeepSeek-V3.2: V3 with sparse attention, its tokens chosen by an indexer."""
    return {
        **_v3(layers),
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "quantization_config": {**_FP8, "scale_fmt": "ue8m0"},
    }


def _v4_flash(layers: int) -> dict[str, Any]:
    """DeepSeek-V4-Flash with sliding-window attention in all layers; the first is routed by a table of token ids."""
    return {
        **_COMMON,
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "num_hash_layers": 1,
        "mlp_layer_types": ["hash_moe", *["moe"] * (layers - 1)],
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "compress_ratios": [0] * layers,
        "compress_rope_theta": 160000.0,
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "max_position_embeddings": 1048576,
        "rope_scaling": _yarn(16, 65536),
        "expert_dtype": "fp4",
        "quantization_config": {**_FP8, "scale_fmt": "ue8m0"},
    }


_CAPITALISED = 4096  # tokens of V4.1's tokenizer that differ from another one only by a capital letter
_ENGRAM_ROWS = 16_000  # of each of an Engram layer's tables; the published ones have a thousand times as many


def _v41(layers: int) -> dict[str, Any]:
    """DeepSeek-V4.1 without its vision tower: layer 1 has an Engram memory and compresses the context for those behind.

    The tables are short; everything else of a layer is as published.
    """
    ngrams, heads = 4, 8
    text = {
        **_v4_flash(layers),
        "model_type": "deepseek_v41",
        "hidden_size": 5120,
        "n_routed_experts": 384,
        "moe_intermediate_size": 2304,
        "q_lora_rank": 1280,
        "num_hash_layers": 0,
        "mlp_layer_types": ["moe"] * layers,
        "compress_ratios": [0, *[2] * (layers - 1)],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "index_n_heads": 32,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [(ngrams - 1) * heads * _ENGRAM_ROWS * 11 // 10],
        "engram_vocab_size": _ENGRAM_ROWS,
        "engram_max_ngram_size": ngrams,
        "engram_n_heads": heads,
        "engram_head_dim": 256,
        "engram_compressed_vocab_size": _VOCABULARY - _CAPITALISED,
        "engram_pad_token_id": 2,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"num_hidden_layers": 24},
        "expert_dtype": "fp4",
        "quantization_config": {**_FP8, "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
    }


MODELS: dict[str, Callable[[int], dict[str, Any]]] = {
    "v3": _v3,
    "v3.2": _v32,
    "v4-flash": _v4_flash,
    "v4.1": _v41,
}
"""By name: the configuration of a model with so many layers."""

ARGUMENTS: dict[str, dict[str, Any]] = {"v4.1": {"limit_mm_per_prompt": {"image": 0}}}
"""Arguments of vLLM's ``LLM`` that a model needs."""


def write(model: str, layers: int, folder: Path, tokenizer: bool = False) -> None:
    """The configuration, and a tokenizer if asked for, or if the model needs one: Engram hashes what tokens have in
    common."""
    config = MODELS[model](layers)
    _put(folder / "config.json", json.dumps(config, indent=1))
    if tokenizer or "engram_layer_ids" in config.get("text_config", config):
        words = _VOCABULARY - _CAPITALISED
        vocabulary = {f"w{i}": i for i in range(words)} | {f"W{i}": words + i for i in range(_CAPITALISED)}
        words_apart: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
        }
        _put(folder / "tokenizer.json", json.dumps(words_apart))
        _put(folder / "tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _put(file: Path, text: str) -> None:
    """Unless the file has this text already: an engine that was started before may be reading it."""
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
