"""Engram memory of DeepSeek-V4.1: the gate that adds the looked-up value to the residual streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tk_serving.engram.engram_gate_fwd import engram_gate_fwd
from tk_serving.engram.fused_weight import fused_weight
from tk_serving_patches import Function, Site
from tk_serving_vllm.sites._calls import left_to_engine, offer, on

_OPERATORS = ("fused_weight", "engram_gate_fwd")
_ENGRAM = "vllm.models.deepseek_v41.common.engram:Engram"
_WEIGHT = "_tk_serving_weight"


def _fused_weight(engram: Any) -> Tensor:
    """The product of both norm weights, made once for each layer."""
    weight = vars(engram).get(_WEIGHT)
    if weight is None:
        weight = vars(engram)[_WEIGHT] = fused_weight(engram.q_weight.data, engram.k_weight.data)
    return weight


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``Engram.forward``."""

    def forward(self: Any, hidden_states: Tensor, hash_ids: Tensor, token_mask: Tensor | None = None) -> Tensor:
        tokens, streams, dim = hidden_states.shape
        if self.use_sequence_parallel:
            left_to_engine(_OPERATORS[1:], "sequence parallelism")
            return original(self, hidden_states, hash_ids, token_mask)
        if self._batch is not None:
            kv = self.wkv(self._batch.wkv_input(self, hash_ids.shape[0]))
        else:
            kv = self.wkv(self.embed(hash_ids).flatten(-2))
        rows = kv.view(tokens, streams + 1, dim)
        call = (
            hidden_states,
            rows[:, :streams],
            rows[:, streams],
            _fused_weight(self),
            self.eps,
            self.clamp_value,
            False,
        )
        options: dict[str, Any] = {"image_token_mask": None if token_mask is None else ~token_mask}
        run = offer("engram-gate", tokens, engram_gate_fwd, *call, **options)
        return original(_Projected(self, kv), hidden_states, hash_ids, token_mask) if run is None else run()[0]

    return forward


class _Projected:
    """An Engram layer whose projection has been computed."""

    _batch = None

    def __init__(self, engram: Any, kv: Tensor) -> None:
        self._engram, self._kv = engram, kv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engram, name)

    def embed(self, _: Any) -> Tensor:
        return self._kv.unsqueeze(-1)

    def wkv(self, _: Any) -> Tensor:
        return self._kv


SITES = (
    Site(
        name="engram-gate",
        operators=_OPERATORS,
        patches=(Function(f"{_ENGRAM}.forward", _forward),),
        why="One pass over the streams with wide loads; the product of the two norm weights is made once.",
        how="Runs vLLM's projection, then our gate, which adds the residual itself, as vLLM's kernel does. Sequence "
        "parallelism stays with vLLM, and so does the hash: vLLM's kernel also collects each token's predecessors.",
        until="vLLM lets models choose their Engram gate.",
        sources={"0.33.0": "1f74bc35b4c03d82"},
        unsuitable=on("cuda"),
    ),
)
