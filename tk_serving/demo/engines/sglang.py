"""The demo on SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tk_serving.demo.compare import TOP, Completion
from tk_serving.demo.server import Server, ServerError

LABEL = "SGLang"
PACKAGE = "sglang"
SERVER = "sglang.launch_server"

EXPECTED = {
    "cpu": ("top2_sum_gate", "get_fused_mapping", "expand_to_fused", "swiglu_forward", "reduce_fused"),
    "cuda": ("top2_sum_gate", "swiglu_forward", "reduce_fused"),
}
"""On CUDA SGLang's Triton experts map and expand inside their matrix product."""

# SGLang has no list of allowed tokens: a bias that outweighs every logit makes the text readable.
_BIAS = 100.0


def arguments(path: Path, model: str, device: str, simulate: bool) -> list[str]:
    """Arguments of the server, without host, port and the flag."""
    words = ["--model-path", str(path), "--served-model-name", model, "--dtype", "bfloat16", "--enable-metrics"]
    words += ["--context-length", "512", "--max-total-tokens", "1024", "--max-running-requests", "2"]
    words += ["--chunked-prefill-size", "64" if simulate else "512", "--mem-fraction-static", "0.3"]
    words += ["--disable-cuda-graph", "--skip-server-warmup"]
    if device == "cpu":
        words += ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
    return words


def environment(device: str) -> dict[str, str]:
    """Variables to add to the server's environment."""
    variables = {"HF_HUB_OFFLINE": "1"}
    if device == "cpu":  # without Dynamo: compiling SGLang's own top-k takes half a minute
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return variables


def complete(server: Server, model: str, prompt: str, tokens: int, allowed: Sequence[int]) -> Completion:
    """The greedy completion of a prompt over SGLang's own interface, and its text over the OpenAI-compatible one.

    Raises:
        ServerError: the two interfaces gave different texts.
    """
    bias = {str(token): _BIAS for token in allowed}
    answer = server.post(
        "/generate",
        {
            "text": prompt,
            "sampling_params": {
                "max_new_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logit_bias": bias,
            },
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": TOP,
        },
    )
    same = server.post(
        "/v1/completions",
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": bias,
        },
    )
    text = same["choices"][0]["text"]
    if text != answer["text"]:
        raise ServerError(f"/v1/completions answered {text!r}, /generate {answer['text']!r}")
    told = answer["meta_info"]
    return Completion(
        text=text,
        tokens=[f"token_id:{token}" for token in answer["output_ids"]],
        prompt_positions=[_by_id(position) for position in told["input_top_logprobs"] if position],
        positions=[_by_id(position) for position in told["output_top_logprobs"]],
    )


def _by_id(position: Sequence[Any]) -> dict[str, float]:
    return {f"token_id:{token}": logprob for logprob, token, *_ in position}
