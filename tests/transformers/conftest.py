"""Tiny random models of every class, with experts that differ enough for the choice to be clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import CONFIGS, EXPERTS, SHARED, TOPK, VOCABULARY
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")


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
        config = getattr(transformers, f"{family}Config")(**{**SHARED, **options, **overrides})
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
