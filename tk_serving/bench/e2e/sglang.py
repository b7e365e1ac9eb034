"""SGLang in this process: its own one-batch benchmark, which runs the model runner without a scheduler."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from tk_serving.bench.e2e import weights
from tk_serving.bench.e2e.engine import Engine, timed


class SGLang(Engine):
    """SGLang with random weights.

    Args:
        settings: as :class:`tk_serving.bench.e2e.vllm.Vllm`; ``arguments`` are those of ``ServerArgs``.
    """

    plugin = "tk_serving_sglang.activate"

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        from sglang.srt.plugins import load_plugins

        started = time.perf_counter()
        load_plugins()
        from sglang.benchmark import one_batch
        from sglang.srt import runtime_context, server_args
        from sglang.srt.model_loader import loader

        self.batches = one_batch
        sizes = sorted(settings["sizes"])
        longest = settings["prefill"] + settings["steps"] + 64
        decode = {"backend": "disabled"} if settings["eager"] else {"backend": "full", "bs": sizes, "max_bs": sizes[-1]}
        arguments = server_args.ServerArgs(
            **{
                "model_path": settings["folder"],
                "kernel_backend": settings["backend"],
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "context_length": longest,
                "chunked_prefill_size": max(8192, settings["prefill"]),
                "max_running_requests": max(64, sizes[-1]),
                "max_total_tokens": max(16384, 2 * longest),
                "disable_radix_cache": True,
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "cuda_graph_config": {"decode": decode, "prefill": {"backend": "disabled"}},
                **settings["arguments"],
            }
        )
        arguments.resolve_once()
        one_batch._set_envs_and_config(arguments)
        ranks = runtime_context.SpawnRanks(
            world_rank=runtime_context.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
        )
        runtime_context.publish(arguments, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
        config = one_batch.ModelConfig.from_server_args(arguments).hf_text_config
        loader.initialize_dummy_weights = lambda model: weights.fill(model, config)
        one_batch.get_tokenizer = lambda *args, **kwargs: None
        self.runner, _ = one_batch.load_model(arguments, one_batch.PortArgs.init_new(arguments), 0, 0)
        self.vocabulary = config.vocab_size
        runner = self.runner.torch_runner
        runner.forward = timed(runner.forward, self.step_ms)
        if settings["backend"] == "tilekernels":
            sys.modules[self.plugin].warm_up()  # a scheduler does so before it is ready
        self.start_s = time.perf_counter() - started

    @property
    def model(self) -> torch.nn.Module:
        return self.runner.torch_runner.model

    @torch.no_grad()
    def generate(self, sequences: int, prompt: int, tokens: int, seed: int = 0, logprobs: int | None = None) -> Any:
        """Greedy tokens after random prompts; the outputs, and the seconds that they took."""
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(2, self.vocabulary, (sequences, prompt), generator=generator).tolist()
        requests = self.batches.prepare_synthetic_inputs_for_latency_test(sequences, prompt, prompts)
        self.runner.clear()
        self.step_ms.clear()
        torch.cuda.synchronize()
        started = time.perf_counter()
        chosen, logits, batch = self.runner.extend(requests)
        answers = [(chosen, _likeliest(logits, logprobs))]
        for _ in range(tokens - 1):
            chosen, logits = self.runner.decode(chosen, batch)
            answers.append((chosen, _likeliest(logits, logprobs)))
        torch.cuda.synchronize()
        return answers, time.perf_counter() - started

    def outputs(self, sequences: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Greedy tokens with the log-probabilities of the likeliest ones."""
        answers, _ = self.generate(sequences, prompt, tokens, seed=1, logprobs=8)
        chosen = torch.stack([tokens for tokens, _ in answers], 1).tolist()
        at = [(best.values.tolist(), best.indices.tolist()) for _, best in answers]
        return {
            "tokens": chosen,
            "logprobs": [
                [{str(t): p for t, p in zip(ids[i], values[i], strict=True)} for values, ids in at]
                for i in range(sequences)
            ],
        }


def _likeliest(logits: torch.Tensor, count: int | None) -> Any:
    return None if count is None else logits.float().log_softmax(-1).topk(count)
