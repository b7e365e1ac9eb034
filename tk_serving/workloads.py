"""The models whose shapes operators are built, tested and measured for, and the inputs of one workload.

Shapes are the published configurations of the checkpoints, under the checkpoints' own names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """Facts of one checkpoint that determine operator shapes."""

    name: str
    key: str
    hidden_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    scoring_func: str
    n_group: int = 0
    topk_group: int = 0
    swiglu_limit: float | None = None
    hc_mult: int = 0
    n_shared_experts: int = 1
    quant_group: int = 128
    num_attention_heads: int = 128
    q_lora_rank: int = 1536
    o_groups: int = 0
    vocab_size: int = 129280


_V4 = functools.partial(Model, scoring_func="sqrtsoftplus", swiglu_limit=10.0, hc_mult=4)

MODELS = (
    Model("deepseek-v3", "v3", 7168, 256, 8, 2048, 2.5, "sigmoid", n_group=8, topk_group=4),
    _V4("v4-flash", "v4-flash", 4096, 256, 6, 2048, 1.5, num_attention_heads=64, q_lora_rank=1024, o_groups=8),
    _V4("v4-pro", "v4-pro", 7168, 384, 6, 3072, 2.5, o_groups=16),
    _V4("v4.1", "v4.1", 5120, 384, 6, 2304, 1.5, quant_group=32, num_attention_heads=64),
)

PHASES = {"decode": (1, 8, 64), "prefill": (512, 4096, 8192)}


@dataclass(frozen=True)
class Workload:
    """One labelled parameter set of an operator, at one or more token counts."""

    label: str
    params: dict[str, Any] = field(hash=False)
    tokens: tuple[int, ...] = PHASES["decode"]
    model: str = ""


def serving(
    parameters: Callable[[Model], dict[str, Any] | None], models: Iterable[Model] = MODELS
) -> tuple[Workload, ...]:
    """Decode and prefill workloads of every model for which ``parameters(model)`` is not None."""
    found = []
    for model in models:
        params = parameters(model)
        if params is not None:
            found += [Workload(f"{model.name}-{phase}", params, tokens, model.key) for phase, tokens in PHASES.items()]
    return tuple(found)


def variants(
    parameters: Callable[[Model], Iterable[dict[str, Any]]], models: Iterable[Model] = MODELS
) -> tuple[Workload, ...]:
    """Further parameter sets of every model, at all token counts, for kernels that are built and not measured."""
    tokens = tuple(count for counts in PHASES.values() for count in counts)
    return tuple(
        Workload(f"{model.name}-variant-{i}", params, tokens, model.key)
        for model in models
        for i, params in enumerate(parameters(model))
    )


def at_one_size(workloads: Iterable[Workload]) -> tuple[Workload, ...]:
    """A decode and a prefill size of each, for variants that are built but of which one row tells enough."""
    sizes = (64, 4096)
    return tuple(dataclasses.replace(one, tokens=tuple(t for t in one.tokens if t in sizes)) for one in workloads)


class Maker:
    """Makes the tensors of a workload on a device, reproducibly.

    Args:
        device: ``meta`` makes shapes only.
        seed: of the random numbers.
        misalign: put every tensor one element past a 16-byte boundary, to exercise the slow load paths.
    """

    def __init__(self, device: str | torch.device = "cpu", seed: int = 0, misalign: bool = False) -> None:
        self.device = torch.device(device)
        self.misalign = misalign
        self._generator = None
        if self.device.type != "meta":
            self._generator = torch.Generator(self.device).manual_seed(seed)

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, misaligned if asked."""
        tensor = tensor.to(self.device)
        if not self.misalign or self.device.type == "meta" or tensor.numel() == 0:
            return tensor
        spare = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=self.device)
        view = spare[1:].view(tensor.shape)
        view.copy_(tensor)
        return view

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal values times ``scale``."""
        if self._generator is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self.place((torch.randn(shape, generator=self._generator, device=self.device) * scale).to(dtype))

    def rand(self, *shape: int) -> Tensor:
        """Uniform float32 values in [0, 1)."""
        if self._generator is None:
            return torch.empty(shape, device="meta")
        return self.place(torch.rand(shape, generator=self._generator, device=self.device))

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        if self._generator is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self.place(torch.randint(low, high, shape, generator=self._generator, device=self.device).to(dtype))

    def topk_ids(self, tokens: int, experts: int, topk: int, kind: str = "distinct") -> Tensor:
        """int64 [tokens, topk] expert ids.

        Args:
            kind: ``distinct`` in each row, as a router gives them; the same ``one`` everywhere; or ``any``, repeated
                and out of range as well.
        """
        if kind == "one":
            return self.randint(experts - 1, experts, tokens, topk)
        if kind == "any":
            return self.randint(-3, experts + 3, tokens, topk)
        if self._generator is None:
            return torch.empty(tokens, topk, dtype=torch.int64, device="meta")
        return self.place(self.rand(tokens, experts).argsort(dim=1)[:, :topk].contiguous())

    def value(self, tensor: Tensor) -> Tensor:
        """A given tensor on the device (its shape alone on the meta device)."""
        return tensor.to("meta") if self._generator is None else self.place(tensor)
