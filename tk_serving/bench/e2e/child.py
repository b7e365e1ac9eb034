"""One engine in a process of its own: takes commands as JSON lines on stdin, answers with marked JSON lines.

The engine runs in this very process, so that its kernels can be profiled and its steps timed on the device.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "@@"  # before an answer; everything else on stdout is the engine's log


class Engine:
    """vLLM with random weights.

    Args:
        settings: ``folder`` of the configuration, ``backend``, ``sizes`` (decode batch sizes), ``prefill`` (tokens),
            ``steps`` (decode steps of a measurement), ``eager``, ``arguments`` (further arguments of ``LLM``).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        from tk_serving.bench.e2e.weights import register_vllm_loader

        started = time.perf_counter()
        sizes = sorted(settings["sizes"])
        graphs = {} if settings["eager"] else {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        longest = settings["prefill"] + settings["steps"] + 64
        self.llm = LLM(
            model=settings["folder"],
            **{
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
                "kernel_config": {"enable_jit_warmup": False},
                **graphs,
                **settings["arguments"],
            },
        )
        self.start_s = time.perf_counter() - started
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.step_ms: list[tuple[Any, Any]] = []
        self._time_steps()

    def _time_steps(self) -> None:
        """Put events around every step of the model runner."""
        import torch

        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        original = runner.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            result = original(*args, **kwargs)
            after.record()
            self.step_ms.append((before, after))
            return result

        runner.execute_model = execute_model

    def generate(self, sequences: int, prompt: int, tokens: int, seed: int = 0, logprobs: int | None = None) -> Any:
        """Greedy tokens after random prompts; the outputs, and the seconds that they took."""
        import torch
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
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        torch.cuda.synchronize()
        return outputs, time.perf_counter() - started

    def _steps(self) -> list[float]:
        return [before.elapsed_time(after) for before, after in self.step_ms]

    def outputs(self, sequences: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Greedy tokens with the log-probabilities of the likeliest ones."""
        outputs, _ = self.generate(sequences, prompt, tokens, seed=1, logprobs=8)
        answers = [output.outputs[0] for output in outputs]
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "logprobs": [[{str(t): p.logprob for t, p in at.items()} for at in answer.logprobs] for answer in answers],
        }

    def prefill(self, tokens: int, seed: int) -> dict[str, float]:
        """One prompt and one token."""
        _, seconds = self.generate(1, tokens, 1, seed)
        return {"ms": max(self._steps()), "wall_ms": seconds * 1e3}

    def decode(self, sequences: int, steps: int, seed: int) -> dict[str, float]:
        """Decode steps after short prompts: the median of the last of them on the device, the mean by the clock."""
        _, seconds = self.generate(sequences, 32, steps + 1, seed)
        ms = self._steps()[-(steps - 2) :]
        return {"ms": statistics.median(ms), "wall_ms": seconds * 1e3 / (steps + 1)}

    def kernels(self, phase: str, size: int, steps: int) -> dict[str, Any]:
        """Milliseconds on the device and calls by kernel, per step of a phase."""
        import torch

        def run() -> None:
            if phase == "prefill":
                self.generate(1, size, 1, seed=3)
            else:
                self.generate(size, 32, steps + 1, seed=3)

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
        ms: dict[str, float] = {}
        calls: dict[str, float] = {}
        times = 1 if phase == "prefill" else steps + 1
        for event in profiler.key_averages():
            if event.self_device_time_total:
                ms[event.key] = ms.get(event.key, 0.0) + event.self_device_time_total / 1e3 / times
                calls[event.key] = calls.get(event.key, 0.0) + event.count / times
        return {"ms": ms, "calls": calls}

    def state(self) -> dict[str, Any]:
        """Start-up time, memory, sites and counters."""
        import torch

        from tk_serving import dispatch

        activate = sys.modules.get("tk_serving_vllm.activate")
        return {
            "start_s": round(self.start_s, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
            "sites": [[r.site, r.operator, r.status, r.reason] for r in activate.ledger.rows()] if activate else [],
            "counters": dispatch.counters(),
        }


def main() -> None:
    """Build the engine of the first line, then obey the following ones until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints must not mix with the answers

    def answer(value: Any) -> None:
        answers.write(MARK + json.dumps(value) + "\n")

    def attempt(action: Callable[[], Any]) -> None:
        try:
            answer({"value": action()})
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"[:2000]})

    settings = json.loads(sys.stdin.readline())
    Path(settings["folder"], "generation_config.json").write_text("{}")
    engine: list[Engine] = []
    attempt(lambda: engine.append(Engine(settings)))
    for line in sys.stdin:
        command = json.loads(line)
        attempt(lambda: getattr(engine[0], command.pop("do"))(**command))  # noqa: B023


if __name__ == "__main__":
    main()
