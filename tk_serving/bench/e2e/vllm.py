"""vLLM in this process."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tk_serving.bench.e2e import host
from tk_serving.bench.e2e.engine import Engine, by_step, on_one_core, time_graphs, timed


class Vllm(Engine):
    """vLLM with random weights.

    Args:
        settings: ``folder`` of the configuration, ``backend``, ``sizes`` (decode batch sizes), ``prefill`` (tokens),
            ``steps`` (decode steps of a measurement), ``longest`` (tokens of the longest prompt, if it is not
            ``prefill``), ``eager``, ``arguments`` (further arguments of ``LLM``).
    """

    plugin = "tk_serving_vllm.activate"

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        from tk_serving.bench.e2e import worker
        from tk_serving_patches import comparing
        from tk_serving_vllm.sites import SITES

        super().__init__()
        started = time.perf_counter()
        sizes = sorted(settings["sizes"])
        graphs = {} if settings["eager"] else {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        most = settings.get("longest", settings["prefill"])
        longest = most + settings["steps"] + 64
        arguments = {
            "model": settings["folder"],
            "load_format": worker.LOAD_FORMAT,
            "worker_extension_cls": worker.NAME,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": settings["eager"],
            "max_model_len": longest,
            "max_num_batched_tokens": max(8192, most),
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
        # Before graphs are captured: vLLM keeps the bound method of a graph that is part of a step.
        self.watch_graphs()
        # The rows of the profiling run say nothing, and comparing so many takes memory.
        with comparing.only([site.name for site in SITES]):
            self.llm, replays = _with_replay(LLM, arguments)
        self.same_texts = {"replay": True} if replays else {}
        self.start_s = time.perf_counter() - started
        self.folder = settings["folder"]
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.attach()

    def watch_graphs(self) -> None:
        """Time what is captured from now on."""
        time_graphs(self.graph_ms)

    def attach(self) -> None:
        """Time the steps of the worker, which is in this process."""
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        runner = self.worker.model_runner
        runner.execute_model = timed(by_step(runner.execute_model, self.graph_ms), self.step_ms)

    @property
    def model(self) -> torch.nn.Module:
        return self.worker.get_model()

    def begin(self) -> None:
        """Forget the steps so far."""
        self.step_ms.clear()
        self.graph_ms.clear()
        torch.cuda.synchronize()

    def end(self) -> None:
        """Wait for the device, which may have begun a step that is not needed."""
        torch.cuda.synchronize()

    def generate(
        self,
        sequences: int,
        prompt: int,
        tokens: int,
        seed: int = 0,
        logprobs: int | None = None,
        at_once: int = 0,
        replay: bool = False,
    ) -> Any:
        """Greedy tokens after random prompts, ``at_once`` or all together; the outputs, and the seconds they took.

        With ``replay`` the texts go on with given tokens, whatever the model says.
        """
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(2, self.vocabulary, (sequences, prompt), generator=generator).tolist()
        given = torch.randint(2, self.vocabulary, (sequences, tokens), generator=generator).tolist()
        fixed: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "logprobs": logprobs,
            "detokenize": False,
        }
        sampling = [SamplingParams(**fixed, **({"trace_decode_token_ids": text} if replay else {})) for text in given]
        self.begin()
        started = time.perf_counter()
        inputs: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = []
        for i in range(0, sequences, at_once or sequences):
            part = slice(i, i + (at_once or sequences))
            outputs += self.llm.generate(inputs[part], sampling[part], use_tqdm=False)
        self.end()
        return outputs, time.perf_counter() - started

    def outputs(self, sequences: int, prompt: int, tokens: int, at_once: int = 0) -> dict[str, Any]:
        """Greedy tokens with the log-probabilities of the likeliest ones; of ``at_once`` prompts at a time."""
        outputs, _ = self.generate(sequences, prompt, tokens, seed=1, logprobs=8, at_once=at_once)
        return _answers(outputs)

    def bench(self, command: str, arguments: Sequence[str]) -> dict[str, Any]:
        """``vllm bench latency`` or ``throughput`` on this engine: what it writes with ``--output-json``.

        The engine takes tokens: prompts that ``throughput`` makes as text need a tokenizer in the model's folder.
        """
        from vllm import LLM
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        module = importlib.import_module(f"vllm.benchmarks.{command}")
        parser = FlexibleArgumentParser()
        module.add_cli_args(parser)
        get_requests: Any = getattr(module, "get_requests", None)

        def as_tokens(args: Any, tokenizer: Any) -> list[Any]:
            requests = get_requests(args, tokenizer)
            for request in requests:
                request.prompt = {"prompt_token_ids": list(tokenizer(request.prompt).input_ids)}
            return requests

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(LLM, "from_engine_args", return_value=self.llm):
            written = Path(folder, "found.json")
            own = [
                "--model",
                self.folder,
                "--tokenizer",
                self.folder,
                "--disable-detokenize",
                "--output-json",
                str(written),
            ]
            args = parser.parse_args([*own, *arguments])
            with on_one_core(), mock.patch.object(module, "get_requests", as_tokens) if get_requests else nullcontext():
                module.main(args)
            return json.loads(written.read_text())

    def host(self, tokens: int, times: int) -> dict[str, Any]:
        """What the host does in a step: see :mod:`tk_serving.bench.e2e.host`."""
        return host.profile(self, tokens, times)

    def speculated(self, sequences: int, tokens: int, octaves: int) -> dict[str, Any]:
        """:meth:`outputs` after prompts that repeat what the model says, so that drafts are accepted; and how many.

        With damped sublayers the next token depends on the last one most of all: a text that comes back to its first
        token goes on as it did.
        """
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(1)
        first = torch.randint(2, self.vocabulary, (sequences, 1), generator=generator).tolist()
        plain = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        with_logprobs = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=8, detokenize=False)
        with self.changed(octaves=octaves):
            inputs: Any = [{"prompt_token_ids": ids} for ids in first]
            said = self.llm.generate(inputs, plain, use_tqdm=False)
            repeated: Any = [
                {"prompt_token_ids": [*ids, *text.outputs[0].token_ids, *ids]}
                for ids, text in zip(first, said, strict=True)
            ]
            before = self._drafts()
            outputs = self.llm.generate(repeated, with_logprobs, use_tqdm=False)
            after = self._drafts()
        return {**_answers(outputs), **{name: after[name] - before[name] for name in after}}

    def _drafts(self) -> dict[str, float]:
        """Tokens that were drafted and accepted so far."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        names = {"drafted": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}
        return {short: values.get(name, 0) for short, name in names.items()}


def _with_replay(make: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, bool]:
    """The engine, and whether its texts can be given: vLLM's newer model runner can do that, without drafts."""
    if "speculative_config" not in arguments and torch.cuda.is_available():
        try:
            return make(**arguments, enable_trace_replay=True), True
        except ValueError as refusal:
            if "trace replay" not in str(refusal):
                raise
    return make(**arguments), False


def _answers(outputs: Any) -> dict[str, Any]:
    answers = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "logprobs": [[{str(t): p.logprob for t, p in at.items()} for at in answer.logprobs] for answer in answers],
    }


class Parallel(Vllm):
    """vLLM on several GPUs, each with a worker process of its own."""

    def attach(self) -> None:
        self._all("tk_time_steps")

    def _all(self, method: str, *args: Any) -> list[Any]:
        """The answers of all workers."""
        return self.llm.collective_rpc(method, args=args)

    @contextmanager
    def changed(self, share: float = 0.0, octaves: int = 0) -> Iterator[None]:
        refused = self._all("tk_change", share, octaves)
        if any(refused):
            raise ValueError(refused[0])
        try:
            yield
        finally:
            self._all("tk_restore")

    @contextmanager
    def only_wrong(self, operator: str, factor: float) -> Iterator[None]:
        self._all("tk_only_wrong", operator, factor)
        try:
            yield
        finally:
            self._all("tk_right")

    def forget_compared(self) -> None:
        self._all("tk_forget_compared")

    def compared(self) -> dict[str, Any]:
        """As of the first worker, and ``ranks`` of all of them; ``first`` of any of them."""
        ranks = self._all("tk_compared")
        return {**ranks[0], "first": next((rank["first"] for rank in ranks if rank["first"]), None), "ranks": ranks}

    def begin(self) -> None:
        self._all("tk_steps")

    def end(self) -> None:
        """The workers wait when they are asked for their steps."""

    def steps(self) -> list[float]:
        """The slower of the workers, for every step."""
        return [max(ms) for ms in zip(*self._all("tk_steps"), strict=True)]

    def kernels(self, phase: str, size: int, steps: int) -> dict[str, Any]:
        """As of one GPU, of the first worker."""
        self._all("tk_profile")
        return self._all("tk_profile", self._run_phase(phase, size, steps))[0]

    def state(self) -> dict[str, Any]:
        """As of one GPU, of the first worker, and ``ranks`` of all of them."""
        ranks = self._all("tk_state")
        return {"start_s": round(self.start_s, 1), **ranks[0], "ranks": ranks}
