"""What is measured on an engine that runs in this process; each engine adds how it is built and how it generates."""

from __future__ import annotations

import os
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch

from tk_serving import dispatch
from tk_serving.bench.e2e import changed


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


@contextmanager
def only_wrong_here(operator: str, factor: float) -> Iterator[None]:
    """:func:`off_by`, and sites that were compared run without the engine's function beside them."""
    from tk_serving_patches import comparing

    with comparing.only([row["site"] for row in comparing.rows()]), off_by(operator, factor):
        yield


def forget_compared_here() -> None:
    """Forget what the comparison of calls has seen in this process."""
    from tk_serving_patches import comparing

    comparing.reset()


def compared_here() -> dict[str, Any]:
    """What the comparison of calls has seen in this process: ``rows`` of all sites, and the ``first`` beyond its
    bound."""
    from tk_serving_patches import comparing

    return {"rows": comparing.rows(), "first": comparing.first()}


def timed(step: Callable[..., Any], events: list[tuple[Any, Any]]) -> Callable[..., Any]:
    """A step of a model runner with events around it, which are added to the list."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        result = step(*args, **kwargs)
        after.record()
        events.append((before, after))
        return result

    return run


def time_graphs(events: list[list[tuple[Any, Any]]]) -> None:
    """From now on every replay of a captured graph has events around it, which are added to the list of the last step
    of :func:`by_step`. For one engine in a process."""
    replay = torch.cuda.CUDAGraph.replay

    def replay_timed(graph: torch.cuda.CUDAGraph) -> None:
        timed(replay, events[-1] if events else [])(graph)

    setattr(torch.cuda.CUDAGraph, "replay", replay_timed)  # noqa: B010


def by_step(step: Callable[..., Any], events: list[list[tuple[Any, Any]]]) -> Callable[..., Any]:
    """A step of a model runner that begins a list of its own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        events.append([])
        return step(*args, **kwargs)

    return run


@contextmanager
def on_one_core() -> Iterator[None]:
    """This thread stays on the last core of the process, so that engines which take turns do so on the same one.

    On different cores the same functions took up to twice as long in one engine as in the other.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Engine(ABC):
    """An engine with random weights.

    Attributes:
        plugin: module of the integration that holds the ledger of call sites.
        step_ms: events before and after every step of the model runner since the last :meth:`generate` began.
        graph_ms: for each of these steps the same around every replay of a captured graph, where an engine has that.
        start_s: seconds that building the engine took.
    """

    plugin = ""
    start_s = 0.0
    same_texts: Mapping[str, Any] = MappingProxyType({})
    """For :meth:`generate` where steps of decode are timed: texts go on alike in every engine that can be told how, so
    that their tokens choose the same experts."""

    def __init__(self) -> None:
        self.step_ms: list[tuple[Any, Any]] = []
        self.graph_ms: list[list[tuple[Any, Any]]] = []

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

    @contextmanager
    def changed(self, share: float = 0.0, octaves: int = 0) -> Iterator[None]:
        """Slightly other weights for a while: see :mod:`tk_serving.bench.e2e.changed`.

        Raises:
            ValueError: the model cannot be damped.
        """
        with ExitStack() as stack:
            if share:
                stack.enter_context(changed.moved(self.model, share))
            if octaves:
                stack.enter_context(changed.damped(self.model, octaves))
            yield

    def outputs_moved(self, share: float, octaves: int = 0, **arguments: Any) -> dict[str, Any]:
        """:meth:`outputs`, once a share of the embedding's values have moved by one step of bfloat16; ``octaves`` as
        for :meth:`outputs_damped`."""
        with self.changed(share, octaves):
            return self.outputs(**arguments)

    def outputs_damped(self, octaves: int, **arguments: Any) -> dict[str, Any]:
        """:meth:`outputs` with sublayers that add less to the residual stream by so many powers of two.

        Raises:
            ValueError: the model has no parameters that say how much.
        """
        with self.changed(octaves=octaves):
            return self.outputs(**arguments)

    def outputs_with(self, sites: Sequence[str], share: float = 0.0, octaves: int = 0, **texts: int) -> dict[str, Any]:
        """:meth:`outputs` with these sites replaced, and none compared; needs ``TK_SERVING_COMPARE``."""
        from tk_serving_patches import comparing

        with comparing.only(sites), self.changed(share, octaves):
            return self.outputs(**texts)

    def sites(self) -> dict[str, Any]:
        """How far every replaced call is from the engine's own function; needs ``TK_SERVING_COMPARE``."""
        self.forget_compared()
        self.generate(4, 500, 4, seed=5)
        self.generate(1, 16, 4, seed=6)
        return self.compared()

    def forget_compared(self) -> None:
        """Forget what the comparison of calls has seen."""
        forget_compared_here()

    def compared(self) -> dict[str, Any]:
        """What the comparison of calls has seen: ``rows`` of all sites, and the ``first`` beyond its bound."""
        return compared_here()

    def wrong(
        self, operators: Sequence[str], factor: float, dampings: Sequence[int], **texts: int
    ) -> dict[str, dict[str, Any]]:
        """How much a wrong kernel shows in the output: for each damping in octaves :meth:`outputs_damped` under ``""``,
        and under the name of an operator with its floating-point results off by ``factor``.

        Graphs do not pass through Python: the engine has to be eager.
        """
        found: dict[str, dict[str, Any]] = {}
        for octaves in dampings:
            at = found[str(octaves)] = {}
            for operator in ("", *operators):
                with self.only_wrong(operator, factor):
                    at[operator] = self.outputs_damped(octaves, **texts) if octaves else self.outputs(**texts)
        return found

    @contextmanager
    def only_wrong(self, operator: str, factor: float) -> Iterator[None]:
        """:func:`only_wrong_here` in all processes of the engine."""
        with only_wrong_here(operator, factor):
            yield

    def steps(self) -> list[float]:
        """Milliseconds of the steps of the last :meth:`generate`."""
        return [before.elapsed_time(after) for before, after in self.step_ms]

    def prefill(self, tokens: int, seed: int) -> dict[str, float]:
        """One prompt and one token."""
        with on_one_core():
            _, seconds = self.generate(1, tokens, 1, seed)
        return {"ms": max(self.steps()), "wall_ms": seconds * 1e3}

    def decode(self, sequences: int, steps: int, seed: int) -> dict[str, float]:
        """Decode steps after short prompts: the median of the last of them on the device, the mean by the clock.

        ``graph_ms``: of the step's captured graphs alone, added; vLLM's V4 is captured in several, with attention
        between them. A step also waits for the host, which takes longer than the device where a model has few layers.
        """
        with on_one_core():
            _, seconds = self.generate(sequences, 32, steps + 1, seed, **self.same_texts)
        ms = self.steps()[-(steps - 2) :]
        found = {"ms": statistics.median(ms), "wall_ms": seconds * 1e3 / (steps + 1)}
        graphs = self.graph_ms[-(steps - 2) :]
        if graphs and all(graphs):
            found["graph_ms"] = statistics.median(
                sum(before.elapsed_time(after) for before, after in step) for step in graphs
            )
        return found

    def kernels(self, phase: str, size: int, steps: int) -> dict[str, Any]:
        """Milliseconds on the device and calls by kernel, per step of a phase."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            times = self._run_phase(phase, size, steps)
        return by_kernel(profiler, times)

    def _run_phase(self, phase: str, size: int, steps: int) -> int:
        """Run one phase; return the number of steps that its times are divided by."""
        if phase == "prefill":
            self.generate(1, size, 1, seed=3)
            return 1
        self.generate(size, 32, steps + 1, seed=3, **self.same_texts)
        return steps + 1

    def state(self) -> dict[str, Any]:
        """Start-up time, memory, sites, counters, and what was compiled here."""
        return {"start_s": round(self.start_s, 1), "same_texts": bool(self.same_texts), **state_here(self.plugin)}


def by_kernel(profiler: Any, times: int) -> dict[str, Any]:
    """``ms`` and ``calls`` by kernel of what was profiled, each divided by ``times``."""
    ms: dict[str, float] = {}
    calls: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.self_device_time_total:
            ms[event.key] = ms.get(event.key, 0.0) + event.self_device_time_total / 1e3 / times
            calls[event.key] = calls.get(event.key, 0.0) + event.count / times
    return {"ms": ms, "calls": calls}


def state_here(plugin: str) -> dict[str, Any]:
    """Memory, sites, counters, and what was compiled in this process."""
    from tk_serving.compile import kernels

    activate = sys.modules.get(plugin)
    return {
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "sites": [[r.site, r.operator, r.status, r.reason] for r in activate.ledger.rows()] if activate else [],
        "counters": dispatch.counters(),
        "kernels": kernels.loaded(),
        "compilations": kernels.compilations(),
    }
