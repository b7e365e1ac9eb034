"""Engram of V4.1: the hash of the n-grams and the gate of the looked-up rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tk_serving.engram.engram_gate_fwd import engram_gate_fwd
from tk_serving.engram.engram_hash import engram_hash
from tk_serving_patches import Function, Site
from tk_serving_sglang.sites._calls import plan

_GATE, _HASH = ("engram_gate_fwd",), ("engram_hash",)
_ENGRAM = "sglang.srt.layers.engram"
_LARGEST = 2**31 - 1

_products = WeakIdKeyDictionary()
_tables = WeakIdKeyDictionary()


def _product(q_weight: Tensor, k_weight: Tensor) -> Tensor:
    """The product of the two weights in float32, made once for each load of the weights."""
    state = (q_weight._version, k_weight._version, k_weight.data_ptr())
    known, product = _products.get(q_weight, (None, None))
    if known != state or product.device != q_weight.device:
        product = (q_weight.float() * k_weight.float()).contiguous()
        _products[q_weight] = state, product
    return product


def _engram_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    def engram_gate(
        x: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        clamp_value: float,
        input_ids: Tensor | None = None,
        image_token_id: int | None = None,
    ) -> Tensor:
        streams, size = x.shape[-2:]
        key, value = kv.split([streams * size, size], dim=-1)
        mask = None
        if input_ids is not None and image_token_id is not None:
            mask = input_ids == image_token_id
        call = (x, key.unflatten(-1, (streams, size)), value, _product(q_weight, k_weight), float(eps))
        options: dict[str, Any] = {"save_for_backward": False, "image_token_mask": mask}
        run = plan("engram-gate", _GATE, engram_gate_fwd, *call, float(clamp_value), **options)
        if run is None:
            return original(x, kv, q_weight, k_weight, eps, clamp_value, input_ids, image_token_id)
        return run()[0]

    return engram_gate


def _int32(table: Tensor) -> Tensor | None:
    """A 32-bit copy of a table of sizes or offsets, made once; None where an entry does not fit."""
    if table not in _tables:
        fits = bool((table.abs() <= _LARGEST).all())
        _tables[table] = table.to(torch.int32).contiguous() if fits else None
    return _tables[table]


def _compute_hash_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_engram_hash_ids(
        tokens: Tensor,
        blocked: Tensor,
        pad_id: int,
        token_map: Tensor,
        multipliers: Tensor,
        primes: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        sizes, starts = _int32(primes), _int32(offsets)
        reason = "tables of more than 2^31 rows" if sizes is None or starts is None else None
        window = torch.where(blocked, pad_id, token_map[tokens]).to(torch.int32).contiguous()
        call = (window, multipliers, sizes if reason is None else primes, starts if reason is None else offsets)
        run = plan("engram-hash", _HASH, engram_hash, *call, reason=reason)
        if run is None:
            return original(tokens, blocked, pad_id, token_map, multipliers, primes, offsets)
        return run().transpose(0, 1).long()

    return compute_engram_hash_ids


SITES = (
    Site(
        name="engram-hash",
        operators=_HASH,
        patches=(Function(f"{_ENGRAM}:compute_engram_hash_ids", _compute_hash_ids),),
        why="One launch for all layers and n-grams where SGLang runs a chain of torch operations.",
        how="The windows stay SGLang's. Its CUDA kernels build the windows, hash and store the history in one launch; "
        "they stay too, as the operator alone would add one.",
        until="SGLang separates the hash from the history.",
        sources={"0.5.23": "edf4832b64dc6acf"},
    ),
    Site(
        name="engram-gate",
        operators=_GATE,
        patches=(Function(f"{_ENGRAM}:engram_gate", _engram_gate),),
        why="Norms, dot product, gate and update in one pass; keys and values are read where the product left them.",
        how="Takes bfloat16 states with a width that 256 divides; the product of the two weights is kept.",
        until="SGLang's registry of kernels dispatches Engram.",
        sources={"0.5.23": "cef2818d4f5353b9"},
    ),
)
