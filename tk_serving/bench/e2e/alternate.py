"""Alternate between the engine with the backend and the engine without, and record what came out."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tk_serving.bench.e2e import child, families, models
from tk_serving.bench.record import versions
from tk_serving.environment import revision

SIDES = {"stock": "auto", "ours": "tilekernels"}
UNIT = (
    "ms on the device for one step of the model runner, by events around it: median over the steps and the rounds; "
    "work of the host between two steps is left out"
)
MAX_DIFFERENCE, MEAN_DIFFERENCE = 5e-2, 2e-3
"""Bounds within which the log-probabilities of both sides agree: rounding in bfloat16 happens in other places."""


@dataclass
class Options:
    """What to run.

    Attributes:
        engine: ``vllm``.
        model: a name of :data:`tk_serving.bench.e2e.models.MODELS`.
        layers: of the model.
        prefill: tokens of the long prompt.
        sizes: batch sizes of decode.
        steps: decode steps of one measurement.
        rounds: measurements of each phase on each side.
        eager: no CUDA graphs and no torch.compile.
        limit: seconds after which no further phase begins.
        arguments: further arguments of ``LLM`` for both sides.
        json: the record; phases of the same models in it are replaced, others kept.
        logs: folder for the logs of the engines.
        revision: Git revision for the record where there is no checkout.
    """

    engine: str = "vllm"
    model: str = "v4-flash"
    layers: int = 4
    prefill: int = 8000
    sizes: Sequence[int] = (1, 8, 64)
    steps: int = 32
    rounds: int = 4
    eager: bool = False
    limit: float = 1e9
    arguments: dict[str, Any] = field(default_factory=dict)
    json: Path | None = None
    logs: Path | None = None
    revision: str = ""


class EngineError(RuntimeError):
    """An engine did not start, or could not do what it was told."""


class Side:
    """The process of one engine."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path) -> None:
        self.name, self.log = name, log
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TK_SERVING_KERNEL_BACKEND": "auto",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", child.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        self._send({**settings, "backend": SIDES[name]})

    def _send(self, value: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The value of the oldest command that was not answered.

        Raises:
            EngineError: it failed.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(child.MARK):
                value = json.loads(line.removeprefix(child.MARK))
                if "error" in value:
                    raise EngineError(f"{self.name}: {value['error']} (see {self.log})")
                return value["value"]
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        raise EngineError(f"{self.name}: the engine ended (see {self.log})\n{tail}")

    def do(self, what: str, **arguments: Any) -> Any:
        """Run one command and wait for its answer."""
        self._send({"do": what, **arguments})
        return self.answer()

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def run(options: Options, console: Console | None = None) -> dict[str, Any]:
    """Measure one model; return the record, which is also written to ``options.json`` after every phase.

    Raises:
        EngineError: an engine failed.
        ValueError: unknown engine or model.
    """
    console = console or Console(soft_wrap=True, highlight=False)
    if options.engine != "vllm":
        raise ValueError(f"bench: e2e: expected vllm, got {options.engine!r}")
    if options.model not in models.MODELS:
        raise ValueError(f"bench: model: expected one of {', '.join(models.MODELS)}, got {options.model!r}")
    started = time.monotonic()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="tk-serving-e2e-"))
    logs.mkdir(parents=True, exist_ok=True)
    folder = logs / options.model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(models.MODELS[options.model](options.layers), indent=1))
    settings = {
        "folder": str(folder),
        "sizes": list(options.sizes),
        "prefill": options.prefill,
        "steps": options.steps,
        "eager": options.eager,
        "arguments": options.arguments,
    }
    sides = {name: Side(name, settings, logs / f"{options.model}-{name}.log") for name in SIDES}
    record = _record(options)
    try:
        for side in sides.values():
            side.answer()
        console.print(f"both engines are ready after {time.monotonic() - started:.0f} s; logs: {logs}")
        comparison = _compare(sides)
        console.print(f"outputs: {comparison}")
        for phase, size in (("decode", 1), *(("decode", s) for s in options.sizes if s != 1), ("prefill", 0)):
            size = size or options.prefill
            if phase == "decode" and size not in options.sizes:
                continue
            if time.monotonic() - started > options.limit:
                record["aborted"] = f"after {options.limit:.0f} s"
                break
            row = _phase(sides, options, phase, size)
            record["rows"].append({**row, **comparison})
            console.print(_line(row))
            _write(record, options)
        record["engines"] = {options.model: {name: side.do("state") for name, side in sides.items()}}
        record["settings"] = {options.model: {**settings, "folder": ""}}
        _write(record, options)
        console.print(_families_table(record))
    finally:
        for side in sides.values():
            side.end()
    return record


def _record(options: Options) -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "revision": options.revision or revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "unit": UNIT,
        "rows": [],
    }


def _compare(sides: dict[str, Side]) -> dict[str, Any]:
    """Greedy tokens of 64 prompts on both sides: how many texts agree, and how far the log-probabilities are apart."""
    outputs = {name: side.do("outputs", sequences=64, prompt=64, tokens=64) for name, side in sides.items()}
    return differences(outputs["ours"], outputs["stock"])


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compare two answers of :meth:`child.Engine.outputs`, each text up to the first token that differs."""
    equal, apart = 0, []
    for mine, other, mine_at, other_at in zip(
        ours["tokens"], theirs["tokens"], ours["logprobs"], theirs["logprobs"], strict=True
    ):
        equal += mine == other
        for a, b, token, token_other in zip(mine_at, other_at, mine, other, strict=True):
            apart += [abs(a[t] - b[t]) for t in a.keys() & b.keys()]
            if token != token_other:
                break
    largest = max(apart, default=float("inf"))
    mean = statistics.fmean(apart) if apart else float("inf")
    return {
        "max_logprob_diff": round(largest, 5),
        "mean_logprob_diff": round(mean, 6),
        "equal_texts": f"{equal}/{len(ours['tokens'])}",
        "agree": largest < MAX_DIFFERENCE and mean < MEAN_DIFFERENCE,
    }


def _phase(sides: dict[str, Side], options: Options, phase: str, size: int) -> dict[str, Any]:
    """Alternate the sides: stock, ours, ours, stock, ...; the first measurement of each is thrown away."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for i in range(options.rounds + 1):
        for name in list(sides) if i % 2 == 0 else list(reversed(sides)):
            if phase == "prefill":
                sample = sides[name].do("prefill", tokens=size, seed=10 + i)
            else:
                sample = sides[name].do("decode", sequences=size, steps=options.steps, seed=10 + i)
            if i:
                samples[name].append(sample)
    kernels = {name: side.do("kernels", phase=phase, size=size, steps=options.steps) for name, side in sides.items()}
    ms = {name: statistics.median(s["ms"] for s in taken) for name, taken in samples.items()}
    wall = {name: statistics.median(s["wall_ms"] for s in taken) for name, taken in samples.items()}
    tokens = f"{size} tokens" if phase == "prefill" else f"{size} sequence{'s' if size > 1 else ''}"
    return {
        "model": options.model,
        "phase": f"{phase} {tokens}",
        "stock": round(ms["stock"], 4),
        "ours": round(ms["ours"], 4),
        "unit": "ms",
        "ratio": round(ms["stock"] / ms["ours"], 4),
        "wall_ms": {name: round(value, 3) for name, value in wall.items()},
        "gpu_ms": {name: round(sum(k["ms"].values()), 4) for name, k in kernels.items()},
        "launches": {name: round(sum(k["calls"].values()), 1) for name, k in kernels.items()},
        "gpu_ms_by_family": {name: families.by_family(k["ms"]) for name, k in kernels.items()},
        "kernels": {name: _top(k) for name, k in kernels.items()},
    }


def _top(kernels: dict[str, Any], count: int = 40) -> list[list[Any]]:
    """The kernels that take longest: name, microseconds and calls for one step."""
    order = sorted(kernels["ms"], key=lambda name: -kernels["ms"][name])[:count]
    return [[name[:100], round(kernels["ms"][name] * 1e3, 2), round(kernels["calls"][name], 2)] for name in order]


def _write(record: dict[str, Any], options: Options) -> None:
    """Into the file, beside the rows of other models that it holds."""
    if options.json is None:
        return
    kept = json.loads(options.json.read_text()) if options.json.exists() else {}
    rows = [row for row in kept.get("rows", ()) if row["model"] != options.model]
    merged = {**kept, **record, "rows": rows + record["rows"]}
    for key in ("engines", "settings"):
        merged[key] = {**kept.get(key, {}), **record.get(key, {})}
    options.json.write_text(json.dumps(merged, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']} {row['phase']}: stock {row['stock']:.3f} ms, ours {row['ours']:.3f} ms, "
        f"ratio {row['ratio']:.3f}; "
        f"by the clock {row['wall_ms']['stock']:.2f} and {row['wall_ms']['ours']:.2f} ms; "
        f"kernels {row['gpu_ms']['stock']:.3f} and {row['gpu_ms']['ours']:.3f} ms, "
        f"{row['launches']['stock']:.0f} and {row['launches']['ours']:.0f} launches"
    )


def _families_table(record: dict[str, Any]) -> Table:
    rows = record["rows"]
    table = Table("family", *(row["phase"] for row in rows), title="ms on the device, stock / ours")
    names = {name for row in rows for side in row["gpu_ms_by_family"].values() for name in side}
    for name in [*(n for n, _ in families.FAMILIES if n in names), *sorted(names - {n for n, _ in families.FAMILIES})]:
        cells = [[row["gpu_ms_by_family"][side].get(name, 0.0) for side in SIDES] for row in rows]
        table.add_row(name, *(f"{a:.3f} / {b:.3f}" for a, b in cells))
    return table
