"""What the host does in a step that no CUDA graph covers: clock, CPU time, garbage collection, and the functions."""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from typing import Any

import torch

TOP = 45


def profile(engine: Any, tokens: int, times: int) -> dict[str, Any]:
    """Steps of one prompt of ``tokens``.

    Returns:
        ``steps``: for each of ``times`` steps ``ms`` on the device by events, ``host_ms`` by the clock until all is
        launched, ``cpu_ms`` of the thread (less than by the clock: it waited, or was not scheduled), ``gc_ms``.
        ``functions``: of as many steps again under a profiler, which slows them: name, calls, milliseconds inside and
        with what it calls, for one step. ``operators``: of torch and the CUDA runtime, the same for one step.
    """
    runner = engine.worker.model_runner
    step = runner.execute_model
    host: list[tuple[float, float]] = []
    collected = [0.0, 0.0]  # since when, and how long altogether

    def on_gc(phase: str, _: Any) -> None:
        now = time.perf_counter()
        if phase == "start":
            collected[0] = now
        else:
            collected[1] += now - collected[0]

    def watched(*args: Any, **kwargs: Any) -> Any:
        clock, cpu = time.perf_counter(), time.thread_time()
        result = step(*args, **kwargs)
        host.append((time.perf_counter() - clock, time.thread_time() - cpu))
        return result

    profiler = cProfile.Profile()

    def profiled(*args: Any, **kwargs: Any) -> Any:
        profiler.enable()
        try:
            return step(*args, **kwargs)
        finally:
            profiler.disable()

    steps = []
    gc.callbacks.append(on_gc)
    try:
        runner.execute_model = watched
        for i in range(times):
            host.clear()
            collected[1] = 0.0
            engine.generate(1, tokens, 1, seed=20 + i)
            clock, cpu = max(host)
            numbers = {"ms": max(engine.steps()), "host_ms": clock * 1e3, "cpu_ms": cpu * 1e3}
            steps.append({k: round(v, 3) for k, v in {**numbers, "gc_ms": collected[1] * 1e3}.items()})
        runner.execute_model = profiled
        for i in range(times):
            engine.generate(1, tokens, 1, seed=20 + i)
    finally:
        runner.execute_model = step
        gc.callbacks.remove(on_gc)
    return {"steps": steps, "functions": _functions(profiler, times), "operators": _operators(engine, tokens)}


def _functions(profiler: cProfile.Profile, times: int) -> list[list[Any]]:
    stats: Any = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = []
    for (file, line, name), (_, calls, inside, total, _) in stats.items():
        where = f"{'/'.join(file.split('/')[-3:])}:{line} {name}"
        rows.append([where, round(calls / times, 1), round(inside * 1e3 / times, 4), round(total * 1e3 / times, 4)])
    inside, total = (sorted(rows, key=lambda row: -row[column])[:TOP] for column in (2, 3))
    return inside + [row for row in total if row not in inside]


def _operators(engine: Any, tokens: int) -> list[list[Any]]:
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profiler:
        engine.generate(1, tokens, 1, seed=20)
    rows = [[e.key[:90], e.count, round(e.self_cpu_time_total / 1e3, 4)] for e in profiler.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:TOP]
