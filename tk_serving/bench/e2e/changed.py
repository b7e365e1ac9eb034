"""A model with slightly other weights for a while: what rounding alone does to its outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def moved(model: torch.nn.Module, share: float) -> Iterator[None]:
    """A share of the embedding's values have moved by one step of bfloat16."""
    named = model.named_parameters()
    (weight,) = (p.data for name, p in named if "embed_tokens" in name and "engram" not in name)
    generator = torch.Generator(weight.device).manual_seed(0)
    kept = weight.clone()
    with torch.inference_mode():
        for rows in weight.view(torch.int16).split(8192):
            rows += torch.rand(rows.shape, generator=generator, device=rows.device) < share
    try:
        yield
    finally:
        with torch.inference_mode():
            weight.copy_(kept)


@contextmanager
def damped(model: torch.nn.Module, octaves: int) -> Iterator[None]:
    """Sublayers add less to the residual stream by so many powers of two, as those of deep models do; what rounding
    does to them matters less then.

    Raises:
        ValueError: the model has no parameters that say how much.
    """
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            last = name.rpartition(".")[2]
            if last in ("hc_attn_base", "hc_ffn_base"):  # pre 4, post 4, comb 16
                changed.append((parameter.data, parameter.data.clone()))
                parameter.data[4:8] -= octaves * math.log(2)
        for name, parameter in [] if changed else model.named_parameters():
            if "scale" in name and any(key in name for key in ("o_proj.", "down_proj.", "w2_")):
                changed.append((parameter.data, parameter.data.clone()))
                parameter.data *= 2.0**-octaves
    if not changed:
        raise ValueError("no gates of hyper-connections and no scales of the last products of sublayers")
    try:
        yield
    finally:
        with torch.inference_mode():
            for values, kept in changed:
                values.copy_(kept)
