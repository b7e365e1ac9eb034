"""vLLM in this process."""

from __future__ import annotations

import time
from typing import Any

import torch

from tk_serving.bench.e2e.engine import Engine
from tk_serving.bench.e2e.weights import register_vllm_loader


class Vllm(Engine):
    """vLLM with random weights.

    Args:
        settings: ``folder`` of the configuration, ``backend``, ``sizes`` (decode batch sizes), ``prefill`` (tokens),
            ``steps`` (decode steps of a measurement), ``eager``, ``arguments`` (further arguments of ``LLM``).
    """

    plugin = "tk_serving_vllm.activate"

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        from tk_serving_patches import comparing
        from tk_serving_vllm.sites import SITES

        super().__init__()
        started = time.perf_counter()
        sizes = sorted(settings["sizes"])
        graphs = {} if settings["eager"] else {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        longest = settings["prefill"] + settings["steps"] + 64
        arguments = {
            "model": settings["folder"],
            "load_format": register_vllm_loader(),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": settings["eager"],
            "max_model_len": longest,
            "max_num_batched_tokens": max(8192, settings["prefill"]),
            "max_num_seqs": max(sizes),
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.45,
            "kv_cache_memory_bytes": 6 << 30,
            "additional_config": {"kernel_backend": settings["backend"]},
            # On an empty cache it compiles for minutes, most of it for sizes that are not measured here.
            "kernel_config": {"enable_jit_warmup": False},
            **graphs,
            **settings["arguments"],
        }
        # The rows of the profiling run say nothing, and comparing so many takes memory.
        with comparing.only([site.name for site in SITES]):
            self.llm = LLM(**arguments)
        self.start_s = time.perf_counter() - started
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        runner = self.worker.model_runner
        runner.execute_model = self.timed(runner.execute_model)

    @property
    def model(self) -> torch.nn.Module:
        return self.worker.get_model()

    def generate(
        self, sequences: int, prompt: int, tokens: int, seed: int = 0, logprobs: int | None = None, at_once: int = 0
    ) -> Any:
        """Greedy tokens after random prompts, ``at_once`` or all together; the outputs, and the seconds they took."""
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(2, self.vocabulary, (sequences, prompt), generator=generator).tolist()
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs, detokenize=False
        )
        self.step_ms.clear()
        torch.cuda.synchronize()
        started = time.perf_counter()
        inputs: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = []
        for i in range(0, sequences, at_once or sequences):
            outputs += self.llm.generate(inputs[i : i + (at_once or sequences)], sampling, use_tqdm=False)
        torch.cuda.synchronize()
        return outputs, time.perf_counter() - started

    def outputs(self, sequences: int, prompt: int, tokens: int, at_once: int = 0) -> dict[str, Any]:
        """Greedy tokens with the log-probabilities of the likeliest ones; of ``at_once`` prompts at a time."""
        outputs, _ = self.generate(sequences, prompt, tokens, seed=1, logprobs=8, at_once=at_once)
        answers = [output.outputs[0] for output in outputs]
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "logprobs": [[{str(t): p.logprob for t, p in at.items()} for at in answer.logprobs] for answer in answers],
        }
