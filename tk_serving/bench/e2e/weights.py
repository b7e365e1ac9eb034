"""Random weights with the spread of trained ones, written straight into a loaded model's parameters.

Engines can invent weights, but theirs are so small that the embedding alone decides the output: a wrong kernel would
not show. Here every sublayer adds about as much to the residual stream as is there already.

Routing is random but never close: tokens belong to topics, which the embedding marks in channels of their own; no
sublayer writes to these channels, and routers read nothing else. So the rounding of an activation sends no token to
another expert. The topics together use most experts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TOPICS = 64  # the last channels of the hidden state
MARK = 4.0  # what the embedding holds in the channel of a token's topic; the residual stream has a spread of 1 to 3
LOGITS_STD = 0.5
_FP4_RMS = 2.93  # of the sixteen values of e2m1
_CODE_STD = 64.0  # of e4m3 codes
_SKIP = ("k_scale", "v_scale", "q_scale", "_prob_scale", "input_scale")
_FROM_SUBLAYERS = ("o_proj", "wo_b", "down_proj", "w2_weight", "w2.weight", "engram.wkv")


def fill(model: torch.nn.Module, config: Any, ranks: Mapping[str, int] | None = None) -> None:
    """Overwrite every parameter of a model that is built but not yet processed; the same values for the same name.

    Args:
        model: what the engine has built.
        config: its configuration.
        ranks: of which this process has one part only: the names of the modules, each with the number of the part.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # engines load in bfloat16, in which some router logits would be equal
    try:
        preferences = _preferences(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(_SKIP) or parameter.is_meta:  # as those of a vision tower that is left out
                    continue
                device = parameter.device
                part = (ranks or {}).get(name.rpartition(".")[0], 0)
                seed = zlib.crc32((f"{name}@{part}" if part else name).encode())
                generator = torch.Generator(device).manual_seed(seed)
                _fill(name, parameter.data, config, preferences, generator)
    finally:
        torch.set_default_dtype(default)


def _fill(name: str, values: Tensor, config: Any, preferences: Tensor, generator: torch.Generator) -> None:
    hidden, last = config.hidden_size, name.rpartition(".")[2]
    if "scale" in last and values.dim() >= 2:
        _fill_scales(name, values, config, generator)
    elif last == "tid2eid":
        for rows in values.split(4096):
            choice = torch.rand(len(rows), config.n_routed_experts, generator=generator, device=rows.device)
            rows.copy_(choice.topk(rows.shape[1]).indices)
    elif values.dtype == torch.uint8 or values.dtype == torch.int8:
        values.view(torch.uint8).random_(0, 256, generator=generator)
    elif values.dtype == torch.float8_e4m3fn:
        for part in _parts(values):
            part.copy_((torch.randn(part.shape, generator=generator, device=part.device) * _CODE_STD).clamp(-448, 448))
    elif ".gate.weight" in name:
        values.zero_()
        values[:, -TOPICS:] = (preferences.t() / (MARK / 2)).to(values)
    elif last in ("e_score_correction_bias", "bias_vl"):
        values.copy_(_bias(len(values)))
    elif last in ("bias", "attn_sink"):
        values.zero_()
    elif "embed" in name:
        values.copy_(torch.randn(values.shape, generator=generator, device=values.device, dtype=values.dtype))
        rows = torch.arange(len(values), device=values.device)
        values[:, -TOPICS:] = 0
        values[rows, hidden - TOPICS + rows % TOPICS] = MARK
    elif "lm_head" in name:
        values.copy_(torch.randn(values.shape, generator=generator, device=values.device, dtype=values.dtype))
        values.mul_(LOGITS_STD / math.sqrt(hidden))
        values[:, -TOPICS:] = 0
    elif last.startswith("hc_"):
        gain = 1 / math.sqrt(values.shape[-1]) if values.dim() == 2 else 0.5
        values.copy_(torch.randn(values.shape, generator=generator, device=values.device) * gain)
        if last.endswith("scale"):
            values.abs_()
    elif values.dim() == 1 or last in ("q_weight", "k_weight"):  # norms
        noise = 0.1 * torch.randn(values.shape, generator=generator, device=values.device)
        values.copy_(1 + noise)
        if values.shape[-1] == hidden:
            values[..., -TOPICS:] = 1
    else:
        for part in _parts(values):
            part.copy_(torch.randn(part.shape, generator=generator, device=part.device) / math.sqrt(values.shape[-1]))
    if values.dim() >= 2 and any(key in name for key in _FROM_SUBLAYERS) and "scale" not in last:
        rows = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
        rows[..., -TOPICS:, :] = 0  # no sublayer writes to the topics


def _fill_scales(name: str, values: Tensor, config: Any, generator: torch.Generator) -> None:
    """Scales such that a product keeps the size of its input, with a spread from block to block."""
    inputs = _inputs(name, config)
    spread = torch.randn(values.shape, generator=generator, device=values.device) * 0.5
    expert = "experts" in name and "shared" not in name
    experts_fp4 = expert and (values.dtype == torch.uint8 or getattr(config, "expert_dtype", "") == "fp4")
    rounded = (getattr(config, "quantization_config", None) or {}).get("scale_fmt") == "ue8m0"
    exponent = spread - math.log2((_FP4_RMS if experts_fp4 else _CODE_STD) * math.sqrt(inputs))
    if values.dtype in (torch.uint8, torch.float8_e8m0fnu):
        values.view(torch.uint8).copy_((exponent.round() + 127).clamp(1, 254))
    else:
        values.copy_(torch.exp2(exponent.round() if rounded else exponent))


def _inputs(name: str, config: Any) -> int:
    """Input channels of the product that the scales of this name belong to; 1 for the rows of a table."""
    if "engram.embed" in name:
        return 1
    widths = {
        "down_proj": getattr(config, "intermediate_size", 0),
        "o_proj": config.num_attention_heads * getattr(config, "v_head_dim", 0),
        "q_b_proj": config.q_lora_rank,
        "kv_b_proj": getattr(config, "kv_lora_rank", 0),
        "wq_b": config.q_lora_rank,
        "wo_a": config.num_attention_heads * getattr(config, "head_dim", 0) // max(getattr(config, "o_groups", 1), 1),
        "wo_b": getattr(config, "o_groups", 1) * getattr(config, "o_lora_rank", 1),
    }
    if "experts" in name and ("w2" in name or "down_proj" in name):
        return config.moe_intermediate_size
    return next((width for key, width in widths.items() if key in name and width), config.hidden_size)


def _parts(values: Tensor) -> tuple[Tensor, ...]:
    """The leading slices of a large tensor, so that its float32 form never exists at once."""
    return tuple(values) if values.dim() >= 3 else values.split(8192)


def _bias(experts: int) -> Tensor:
    """Routing bias that matters without near ties: some experts are never chosen, the others compete as they are."""
    bias = torch.zeros(experts)
    step = 16 if experts >= 64 else 4
    bias[step - 1 :: step] = -4
    return bias


def _preferences(config: Any) -> Tensor:
    """float32 [topics, experts]: logits of a router without near ties, for normalised marks of any likely size."""
    experts = config.n_routed_experts
    groups, kept = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    generator = torch.Generator().manual_seed(0)
    sizes = torch.linspace(0.5, 2.5, 21)
    rows: list[Tensor] = []
    while len(rows) < TOPICS:
        logits = torch.linspace(-2, 2, experts)[torch.randperm(experts, generator=generator)]
        keys = ((sizes[:, None] * logits).sigmoid() + _bias(experts)).view(len(sizes), groups, -1)
        two = keys.topk(2, -1).values.sum(-1).sort(-1, descending=True)
        chosen = {tuple(sorted(row.tolist())) for row in two.indices[:, :kept]}
        clear = groups == kept or (two.values[:, kept - 1] - two.values[:, kept]).min() > 2e-3
        if len(chosen) == 1 and clear:
            rows.append(logits)
    return torch.stack(rows)


def _parts_here(model: torch.nn.Module) -> dict[str, int]:
    """The modules of vLLM that are divided among devices, each with the rank of this process."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.linear import ReplicatedLinear

    rank = get_tensor_model_parallel_rank()
    return {
        name: rank
        for name, module in model.named_modules()
        if (getattr(module, "tp_size", 1) > 1 and not isinstance(module, ReplicatedLinear))
        or type(module).__name__ == "RoutedExperts"
    }


def register_vllm_loader(name: str = "tk_random") -> str:
    """Register :func:`fill` as a load format of vLLM in this process; return its name."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(name)
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            fill(model, model_config.hf_text_config, _parts_here(model))
            if getattr(model, "finalizes_weights_during_load", False):
                model.process_weights_after_loading()  # type: ignore[operator]

    return name
