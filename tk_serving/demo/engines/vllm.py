"""The demo on vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tk_serving.demo.compare import TOP, Completion
from tk_serving.demo.server import Server

LABEL = "vLLM"
PACKAGE = "vllm"
SERVER = "vllm.entrypoints.openai.api_server"

EXPECTED = {
    "cpu": ("top2_sum_gate", "get_fused_mapping", "expand_to_fused", "swiglu_forward", "reduce_fused"),
    "cuda": ("top2_sum_gate", "swiglu_forward", "reduce_fused"),
}
"""On CUDA vLLM's Triton experts map and expand inside their matrix product."""

# A simulated launch takes long on large inputs: few tokens at a time, and a short context.
_SIZES = ("--max-num-batched-tokens", "512", "--max-num-seqs", "4", "--max-model-len", "512")
_SIMULATED_SIZES = ("--max-num-batched-tokens", "64", "--max-num-seqs", "1", "--max-model-len", "64")


def arguments(path: Path, model: str, device: str, simulate: bool) -> list[str]:
    """Arguments of the server, without host, port and the flag."""
    sizes = _SIMULATED_SIZES if simulate else _SIZES
    return ["--model", str(path), "--served-model-name", model, "--dtype", "bfloat16", "--enforce-eager", *sizes]


def environment(device: str) -> dict[str, str]:
    """Variables to add to the server's environment."""
    return {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def complete(server: Server, model: str, prompt: str, tokens: int, allowed: Sequence[int]) -> Completion:
    """The greedy completion of a prompt over the OpenAI-compatible interface."""
    answer = server.post(
        "/v1/completions",
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": list(allowed),
            "logprobs": TOP,
            "prompt_logprobs": TOP,
            "return_tokens_as_token_ids": True,
        },
    )
    choice = answer["choices"][0]
    return Completion(
        text=choice["text"],
        tokens=choice["logprobs"]["tokens"],
        prompt_positions=[_by_id(position) for position in choice["prompt_logprobs"] if position],
        positions=choice["logprobs"]["top_logprobs"],
    )


def _by_id(position: dict[str, Any]) -> dict[str, float]:
    return {f"token_id:{token}": entry["logprob"] for token, entry in position.items()}
