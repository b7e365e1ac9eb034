"""A tiny checkpoint with real random weights, for servers that are to be compared.

Engines can invent weights, but theirs are so small that the embedding alone decides the output: a wrong kernel would
not show. These have the spread of a trained model: every sublayer adds about as much to the residual stream as is
there already, so the output depends on every layer.

One thing is not random. With random routers some token always falls between two experts, and the last bit of an
activation would send it to the one or the other. Here tokens belong to topics, which the embedding marks in channels
of their own; no sublayer writes to these channels, and routers read nothing else, with clear preferences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODELS = {"v3": "deepseek_v3"}
"""Model names of the demo, and the configuration each stands for."""

# Standard deviation of the logits. The engines compute logits in bf16, whose step between 1 and 2 is 0.008: larger
# logits would drown the comparison in the rounding of this one product.
_LOGITS_STD = 0.3

_TOPICS = 8  # the last channels of the hidden state mark the topic of a token
_MARK = 4.0  # what the embedding holds there; the residual stream around it has a spread of 1 to 2
_MARGIN = 0.03  # between the last expert (or group) that is chosen and the first that is not


def config(model: str) -> dict[str, Any]:
    """The configuration of a tiny model."""
    return json.loads((files("tk_serving.demo") / "models" / f"{MODELS[model]}.json").read_text())


def write(model: str, folder: Path, seed: int = 1) -> Path:
    """Write configuration, tokenizer and weights of a tiny model; return the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    settings = config(model)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    (folder / "generation_config.json").write_text("{}")
    _write_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: tensor.contiguous() for name, tensor in _weights(settings, generator)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(c: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a DeepSeek-V3 checkpoint."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        values = torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))
        return values.bfloat16()

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16()

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.gate_proj.weight", matrix(width, hidden)
        yield f"{prefix}.up_proj.weight", matrix(width, hidden)
        yield f"{prefix}.down_proj.weight", output(hidden, width, gain=1.5)  # SwiGLU shrinks its input

    def output(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        """The projection of a sublayer back to the residual stream, topics excepted."""
        values = matrix(rows, columns, gain)
        values[-_TOPICS:] = 0
        return values

    embedding = matrix(c["vocab_size"], hidden, gain=math.sqrt(hidden))
    embedding[:, -_TOPICS:] = _MARK * torch.eye(_TOPICS).repeat(-(-c["vocab_size"] // _TOPICS), 1)[: c["vocab_size"]]
    yield "model.embed_tokens.weight", embedding
    for i in range(c["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{attention}.q_a_proj.weight", matrix(c["q_lora_rank"], hidden)
        yield f"{attention}.q_a_layernorm.weight", norm(c["q_lora_rank"])
        query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        yield f"{attention}.q_b_proj.weight", matrix(query, c["q_lora_rank"])
        yield f"{attention}.kv_a_proj_with_mqa.weight", matrix(c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden)
        yield f"{attention}.kv_a_layernorm.weight", norm(c["kv_lora_rank"])
        key_value = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        yield f"{attention}.kv_b_proj.weight", matrix(key_value, c["kv_lora_rank"])
        yield f"{attention}.o_proj.weight", output(hidden, heads * c["v_head_dim"])
        weight = norm(hidden)
        weight[-_TOPICS:] = 1
        yield f"{layer}.post_attention_layernorm.weight", weight
        if i < c["first_k_dense_replace"]:
            yield from mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        experts, width = c["n_routed_experts"], c["moe_intermediate_size"]
        preferences, bias = _router(experts, c["n_group"], c["topk_group"], c["num_experts_per_tok"], generator)
        gate = torch.zeros(experts, hidden, dtype=torch.bfloat16)
        gate[:, -_TOPICS:] = preferences.t() / (_MARK / 2)
        yield f"{layer}.mlp.gate.weight", gate
        yield f"{layer}.mlp.gate.e_score_correction_bias", bias
        for j in range(experts):
            yield from mlp(f"{layer}.mlp.experts.{j}", width)
        yield from mlp(f"{layer}.mlp.shared_experts", width * c["n_shared_experts"])
    yield "model.norm.weight", norm(hidden)
    head = matrix(c["vocab_size"], hidden, gain=_LOGITS_STD)
    head[:, -_TOPICS:] = 0
    yield "lm_head.weight", head


def _router(experts: int, groups: int, kept: int, topk: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits [topics, experts] and bias [experts] of a router without near ties that uses every expert."""
    bias = 0.02 * torch.randn(experts, generator=generator)
    scales = torch.linspace(0.5, 2.5, 21)  # the normalisation before the router scales the logits, token by token
    while True:
        rows: list[Tensor] = []
        while len(rows) < _TOPICS:
            logits = torch.linspace(-2, 2, experts)[torch.randperm(experts, generator=generator)]
            if all(_margin((scale * logits).sigmoid() + bias, groups, kept, topk) > _MARGIN for scale in scales):
                rows.append(logits)
        if len({e for row in rows for e in _chosen(row.sigmoid() + bias, groups, kept, topk)}) == experts:
            return torch.stack(rows), bias


def _chosen(keys: Tensor, groups: int, kept: int, topk: int) -> list[int]:
    """The experts that a group-limited top-k chooses."""
    best = keys.view(groups, -1).topk(2).values.sum(-1).topk(kept).indices
    allowed = torch.full_like(keys, -torch.inf).view(groups, -1).index_copy(0, best, keys.view(groups, -1)[best])
    return allowed.flatten().topk(topk).indices.tolist()


def _margin(keys: Tensor, groups: int, kept: int, topk: int) -> float:
    """How far the choice of groups, and of experts in them, is from a tie."""
    grouped = keys.view(groups, -1)
    by_group = grouped.topk(2).values.sum(-1).sort(descending=True)
    inside = grouped[by_group.indices[:kept]].flatten().sort(descending=True).values
    return min(by_group.values[kept - 1] - by_group.values[kept], inside[topk - 1] - inside[topk]).item()


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<pad>"])}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[char] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)


def printable(folder: Path) -> list[int]:
    """Ids of the tokens that are letters, space, comma or full stop, so that random text is readable."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(i for token, i in vocabulary.items() if token in "abcdefghijklmnopqrstuvwxyz,." or token == "Ġ")
