"""What is measured on an engine that runs in this process; each engine adds how it is built and how it generates."""

from __future__ import annotations

import math
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tk_serving import dispatch


@contextmanager
def off_by(operator: str, factor: float) -> Iterator[None]:
    """Floating-point results of one operator are off by a factor; scales stand for the codes that they belong to."""
    run = dispatch.run

    def run_wrong(op: Any, *args: Any) -> list[torch.Tensor | None]:
        outputs = run(op, *args)
        if op.name == operator:
            for out in outputs:
                if out is not None and out.is_floating_point() and out.dtype.itemsize > 1:
                    out.mul_(factor)
        return outputs

    dispatch.run = run_wrong
    try:
        yield
    finally:
        dispatch.run = run


class Engine(ABC):
    """An engine with random weights.

    Attributes:
        plugin: module of the integration that holds the ledger of call sites.
        step_ms: events before and after every step of the model runner since the last :meth:`generate` began.
        start_s: seconds that building the engine took.
    """

    plugin = ""
    start_s = 0.0

    def __init__(self) -> None:
        self.step_ms: list[tuple[Any, Any]] = []

    @property
    @abstractmethod
    def model(self) -> torch.nn.Module:
        """The model that runs."""

    @abstractmethod
    def generate(self, sequences: int, prompt: int, tokens: int, seed: int = 0, logprobs: int | None = None) -> Any:
        """Greedy tokens after random prompts; the outputs, and the seconds that they took."""

    @abstractmethod
    def outputs(self, sequences: int, prompt: int, tokens: int) -> dict[str, Any]:
        """``tokens`` of every text, and ``logprobs``: for each of them the likeliest tokens with theirs."""

    def outputs_moved(self, share: float, octaves: int = 0, **arguments: Any) -> dict[str, Any]:
        """:meth:`outputs`, once a share of the embedding's values have moved by one step of bfloat16; ``octaves`` as
        for :meth:`outputs_damped`."""
        named = self.model.named_parameters()
        (weight,) = (p.data for name, p in named if "embed_tokens" in name and "engram" not in name)
        generator = torch.Generator(weight.device).manual_seed(0)
        kept = weight.clone()
        with torch.inference_mode():
            for rows in weight.view(torch.int16).split(8192):
                rows += torch.rand(rows.shape, generator=generator, device=rows.device) < share
        try:
            return self.outputs_damped(octaves, **arguments) if octaves else self.outputs(**arguments)
        finally:
            with torch.inference_mode():
                weight.copy_(kept)

    def outputs_damped(self, octaves: int, **arguments: Any) -> dict[str, Any]:
        """:meth:`outputs` with sublayers that add less to the residual stream by so many powers of two, as those of
        deep models do; what rounding does to them matters less then.

        Raises:
            ValueError: the model has no parameters that say how much.
        """
        changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.inference_mode():
            for name, parameter in self.model.named_parameters():
                last = name.rpartition(".")[2]
                if last in ("hc_attn_base", "hc_ffn_base"):  # pre 4, post 4, comb 16
                    changed.append((parameter.data, parameter.data.clone()))
                    parameter.data[4:8] -= octaves * math.log(2)
            for name, parameter in [] if changed else self.model.named_parameters():
                if "scale" in name and any(key in name for key in ("o_proj.", "down_proj.", "w2_")):
                    changed.append((parameter.data, parameter.data.clone()))
                    parameter.data *= 2.0**-octaves
        if not changed:
            raise ValueError("no gates of hyper-connections and no scales of the last products of sublayers")
        try:
            return self.outputs(**arguments)
        finally:
            with torch.inference_mode():
                for values, kept in changed:
                    values.copy_(kept)

    def sites(self) -> dict[str, Any]:
        """How far every replaced call is from the engine's own function; needs ``TK_SERVING_COMPARE``."""
        from tk_serving_patches import comparing

        comparing.reset()
        self.generate(4, 500, 4, seed=5)
        self.generate(1, 16, 4, seed=6)
        return {"rows": comparing.rows(), "first": comparing.first()}

    def wrong(
        self, operators: Sequence[str], factor: float, dampings: Sequence[int], **texts: int
    ) -> dict[str, dict[str, Any]]:
        """How much a wrong kernel shows in the output: for each damping in octaves :meth:`outputs_damped` under ``""``,
        and under the name of an operator with its floating-point results off by ``factor``.

        Graphs do not pass through Python: the engine has to be eager.
        """
        from tk_serving_patches import comparing

        found: dict[str, dict[str, Any]] = {}
        with comparing.only([row["site"] for row in comparing.rows()]):  # not one by one beside the engine's function
            for octaves in dampings:
                at = found[str(octaves)] = {}
                for operator in ("", *operators):
                    with off_by(operator, factor):
                        at[operator] = self.outputs_damped(octaves, **texts) if octaves else self.outputs(**texts)
        return found

    def timed(self, step: Any) -> Any:
        """A step of the model runner with events around it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            result = step(*args, **kwargs)
            after.record()
            self.step_ms.append((before, after))
            return result

        return run

    def _steps(self) -> list[float]:
        return [before.elapsed_time(after) for before, after in self.step_ms]

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
        """Start-up time, memory, sites, counters, and what was compiled here."""
        from tk_serving.compile import kernels

        activate = sys.modules.get(self.plugin)
        return {
            "start_s": round(self.start_s, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
            "sites": [[r.site, r.operator, r.status, r.reason] for r in activate.ledger.rows()] if activate else [],
            "counters": dispatch.counters(),
            "kernels": kernels.loaded(),
            "compilations": kernels.compilations(),
        }
