"""Alternate between the engine with the backend and the engine without, and record what came out."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tk_serving.bench.e2e import child, families, models
from tk_serving.bench.record import versions
from tk_serving.environment import revision

ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class Kind:
    """How the engine of one side is started.

    Attributes:
        backend: of ``--kernel-backend``.
        environment: variables of its process.
        caches: whose caches of compiled code it uses, where the environment names none: below the folder of the logs.
        eager: no CUDA graphs and no torch.compile, whatever the options say.
        layers: of the model, if not as the options say.
    """

    backend: str
    caches: str = "ours"
    environment: Mapping[str, str] = field(default_factory=dict)
    eager: bool = False
    layers: int = 0


SIDES = {"stock": Kind("auto", "stock"), "ours": Kind("tilekernels")}
COMPARED = Kind("tilekernels", environment={"TK_SERVING_COMPARE": "1"}, eager=True, layers=2)
CACHES = (
    "VLLM_CACHE_ROOT",
    "DG_JIT_CACHE_DIR",
    "SGLANG_DG_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "CUDA_CACHE_PATH",  # of the driver: vLLM's wheel has Marlin for Hopper as PTX only
)
UNIT = (
    "ms on the device for one step of the model runner, by events around it: median over the steps and the rounds; "
    "work of the host between two steps is left out; graph_ms: of the captured graphs of a decode step alone"
)
MAX_DIFFERENCE, MEAN_DIFFERENCE = 5e-2, 2e-3
"""Bounds within which the log-probabilities of both sides agree: rounding in bfloat16 happens in other places."""

NOISE, MEAN_NOISE = 1.5, 1.25
"""Where the engine itself is beyond these bounds once an input moves by a step of bfloat16, ours may be at most so much
farther from it than it is from itself: the largest difference, and the mean."""

DAMPINGS = (0, 3, 5, 7)
"""Octaves by which sublayers add less to the residual stream than random weights make them: with more of them the
engine comes to agree with itself, and the bounds apply."""

TEXTS = {"sequences": 64, "prompt": 64, "tokens": 64}
WRONG = 1.05  # what an operator's results are multiplied by to see whether that shows

MOVED = 0.01
"""Share of the embedding's values that move by a step for that."""

ONE_GPU = {
    "worker_cls": "tk_serving.bench.e2e.one_gpu.Worker",
    "distributed_executor_backend": "mp",  # or vLLM counts the GPUs
    "disable_custom_all_reduce": True,  # it looks for peers by device
}
"""Arguments of ``LLM`` with which all ranks share one GPU."""


@dataclass
class Options:
    """What to run.

    Attributes:
        engine: ``vllm`` or ``sglang``.
        model: a name of :data:`tk_serving.bench.e2e.models.MODELS`.
        layers: of the model.
        prefill: tokens of the long prompt.
        sizes: batch sizes of decode.
        steps: decode steps of one measurement.
        rounds: measurements of each phase on each side.
        eager: no CUDA graphs and no torch.compile.
        limit: seconds after which no further phase begins.
        start_limit: seconds within which an engine has to be ready.
        compare: also run every replaced call beside the engine's own function, in a third process.
        experts: a record for FP4 experts with FP8 activations, which are then measured as well
            (:mod:`tk_serving.bench.e2e.experts`).
        arguments: further arguments of ``LLM`` or ``ServerArgs`` for both sides.
        one_gpu: all ranks share one GPU (:mod:`tk_serving.bench.e2e.one_gpu`): outputs are compared, nothing is timed.
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
    start_limit: float = 400
    compare: bool = True
    experts: Path | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    one_gpu: bool = False
    json: Path | None = None
    logs: Path | None = None
    revision: str = ""

    @property
    def name(self) -> str:
        """The model and what is particular about its engines, as records name them."""
        found = [self.model]
        if self.arguments.get("tensor_parallel_size", 1) > 1:
            found.append(f"tensor parallel {self.arguments['tensor_parallel_size']}")
        if self.arguments.get("enable_expert_parallel"):
            found.append("expert parallel")
        for key in ("moe_backend", "moe_runner_backend"):
            if key in self.arguments:
                found.append(f"{key} {self.arguments[key]}")
        if "speculative_config" in self.arguments:
            found.append(f"speculative {self.arguments['speculative_config']['method']}")
        if self.one_gpu:
            found.append("on one GPU")
        return ", ".join(found)


class EngineError(RuntimeError):
    """An engine did not start, or could not do what it was told."""


class Side:
    """The process of one engine."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path, kind: Kind | None = None) -> None:
        self.name, self.log = name, log
        kind = kind or SIDES[name]
        caches = log.parent / f"caches-{kind.caches}"
        environment = {
            **os.environ,
            **{name: str(caches / name.lower()) for name in CACHES if name not in os.environ},
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TK_SERVING_KERNEL_BACKEND": "auto",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **kind.environment,
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
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._send({**settings, "backend": kind.backend, "eager": kind.eager or settings.get("eager", False)})

    def _send(self, value: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``answer`` says why
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answer(self, limit: float | None = None) -> Any:
        """The value of the oldest command that was not answered.

        Raises:
            EngineError: it failed, or took more than ``limit`` seconds.
        """
        until = None if limit is None else time.monotonic() + limit
        while True:
            try:
                line = self._lines.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise EngineError(
                    f"{self.name}: no answer within {limit:.0f} s (see {self.log})\n{self._tail()}"
                ) from None
            if line is None:
                raise EngineError(f"{self.name}: the engine ended (see {self.log})\n{self._tail()}")
            if line.startswith(child.MARK):
                value = json.loads(line.removeprefix(child.MARK))
                if "error" in value:
                    raise EngineError(f"{self.name}: {value['error']} (see {self.log})")
                return value["value"]

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def do(self, what: str, **arguments: Any) -> Any:
        """Run one command and wait for its answer."""
        self._send({"do": what, **arguments})
        return self.answer()

    def end(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def validate(options: Options) -> None:
    """Refuse what is not known, before anything is started.

    Raises:
        ValueError: unknown engine or model, or one GPU for what has one rank or is timed.
    """
    if options.engine not in ENGINES:
        raise ValueError(f"bench: e2e: expected one of {', '.join(ENGINES)}, got {options.engine!r}")
    if options.model not in models.MODELS:
        raise ValueError(f"bench: model: expected one of {', '.join(models.MODELS)}, got {options.model!r}")
    if options.one_gpu and (options.engine != "vllm" or options.arguments.get("tensor_parallel_size", 1) < 2):
        raise ValueError("bench: one GPU: expected vllm with a tensor_parallel_size of at least 2 in the arguments")
    if options.one_gpu and options.experts:
        raise ValueError("bench: one GPU: the experts' record is one of times")


def run(options: Options, console: Console | None = None) -> dict[str, Any]:
    """Measure one model; return the record, which is also written to ``options.json`` after every phase.

    Raises:
        EngineError: an engine failed.
        ValueError: unknown engine or model.
    """
    console = console or Console(soft_wrap=True, highlight=False)
    validate(options)
    from tk_serving.bench.e2e import experts, tools

    started = time.monotonic()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="tk-serving-e2e-"))
    logs.mkdir(parents=True, exist_ok=True)
    kinds = {**SIDES, **({"compared": COMPARED} if options.compare else {})}
    sides = {name: _start(name, kind, options, logs) for name, kind in kinds.items()}
    record = _record(options)

    def late() -> bool:
        if time.monotonic() - started > options.limit:
            record["aborted"] = f"after {options.limit:.0f} s"
        return "aborted" in record

    try:
        two = {name: sides[name] for name in SIDES}
        if options.compare:  # needs no other engine
            _compare_sites(sides["compared"], options, record, console)
        for side in reversed(two.values()):  # ours first: what it says must not depend on the other
            side.answer(options.start_limit)
            console.print(f"{side.name} is ready after {time.monotonic() - started:.0f} s; logs: {logs}")
        comparison = _compare(two, options)
        console.print(f"outputs: {comparison}")
        if options.one_gpu:
            record["outputs"] = {options.name: comparison}
            record["engines"] = {options.name: {name: side.do("state") for name, side in two.items()}}
        for phase, size in _phases(options):
            if late():
                break
            row = _phase(two, options, phase, size)
            record["rows"].append({**row, **comparison})
            console.print(_line(row))
            record["engines"] = {options.name: {name: side.do("state") for name, side in two.items()}}
            _write(record, options.json, options.name)
        record["settings"] = {options.name: {**_settings(options), "layers": options.layers}}
        if options.engine == "vllm" and not options.one_gpu and not late():
            record["vllm_bench"] = {options.name: tools.vllm_bench(two)}
            console.print(record["vllm_bench"])
        _write(record, options.json, options.name)
        if record["rows"]:
            console.print(_families_table(record))
        if options.experts and not late():
            sides |= {name: _start(name, kind, options, logs) for name, kind in experts.MODES.items()}
            experts.wait_and_measure(sides, options, record, console)
    finally:
        for side in sides.values():
            side.end()
    return record


def _start(name: str, kind: Kind, options: Options, logs: Path) -> Side:
    layers = kind.layers or options.layers
    folder = logs / f"{options.model}-{layers}"
    folder.mkdir(exist_ok=True)
    models.write(options.model, layers, folder, tokenizer=options.engine == "vllm")
    settings = {**_settings(options), "folder": str(folder)}
    return Side(name, settings, logs / f"{options.model}-{name}.log", kind)


def _settings(options: Options) -> dict[str, Any]:
    from tk_serving.bench.e2e import experts

    needed = models.ARGUMENTS.get(options.model, {}) if options.engine == "vllm" else {}
    shared = ONE_GPU if options.one_gpu else {}
    return {
        "engine": options.engine,
        "sizes": list(options.sizes),
        "prefill": options.prefill,
        "steps": options.steps,
        "longest": max((options.prefill, *(experts.SIZES if options.experts else ()))),
        "eager": options.eager,
        "arguments": {**needed, **shared, **options.arguments},
    }


def _phases(options: Options) -> list[tuple[str, int]]:
    """What tells most comes first."""
    if options.one_gpu:
        return []
    decode = [("decode", size) for size in sorted(options.sizes)]
    return [*decode[:1], ("prefill", options.prefill), *decode[1:]]


def _compare_sites(side: Side, options: Options, record: dict[str, Any], console: Console) -> None:
    """Every site beside the engine's own function; a failure here leaves the measurement as it is."""
    try:
        side.answer(options.start_limit)
        found = side.do("sites")
    except EngineError as error:
        found = {"error": str(error)}
        console.print(f"sites could not be compared: {error}")
    else:
        table = Table(
            "site", "calls", "beyond its bound", "largest", "mean", title="relative difference from the engine"
        )
        for row in found["rows"]:
            numbers = (str(row["calls"]), str(row["beyond"]), f"{row['largest']:.2e}", f"{row['mean']:.2e}")
            table.add_row(row["site"], *numbers)
        console.print(table)
        console.print(f"first site beyond its bound: {found['first'] or 'none'}")
        with contextlib.suppress(EngineError):
            record["wrong"] = {options.name: wrong_operators(side, WRONG, DAMPINGS, {**TEXTS, "tokens": 16})}
    finally:
        side.end()
    record["sites"] = {options.name: found}


def wrong_operators(
    side: Side, factor: float, dampings: Sequence[int], texts: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """For every damping, how far the output moves when one operator's results are off by a factor: what tells a wrong
    kernel from rounding. A factor that the last norm takes out again moves nothing."""
    counted = side.do("state")["counters"]
    operators = sorted({row["operator"] for row in counted if row["implementation"] == "kernel" and row["calls"]})
    found: dict[str, dict[str, Any]] = {}
    answers = side.do("wrong", operators=operators, factor=factor, dampings=list(dampings), **texts)
    for octaves, at in answers.items():
        right = at.pop("")
        found[octaves] = {name: _numbers(differences(other, right)) for name, other in at.items()}
    return found


def _record(options: Options) -> dict[str, Any]:
    import torch

    return {
        "engine": options.engine,
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "revision": options.revision or revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "unit": UNIT,
        "rows": [],
    }


def _compare(sides: Mapping[str, Side], options: Options) -> dict[str, Any]:
    """Greedy tokens of the same prompts on both sides, and how far the engine is from itself: with an input that
    differs by rounding, and in smaller batches; as the weights are, and with sublayers that add less."""
    return compare({"ours": sides["ours"]}, sides["stock"], options)["ours"]


def compare(
    others: Mapping[str, Side],
    stock: Side,
    options: Options,
    texts: Mapping[str, int] = TEXTS,
    dampings: Sequence[int] = DAMPINGS,
    in_batches: Sequence[int] = (0,),
) -> dict[str, dict[str, Any]]:
    """The verdict on the outputs of each of the others.

    Args:
        others: by name.
        stock: the engine without us.
        options: of the run.
        texts: arguments of ``Engine.outputs``.
        dampings: octaves, 0 among them.
        in_batches: those of them at which the engine also runs batches of 8, where it can.
    """
    levels: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in others}
    for octaves in dampings:
        what, more = ("outputs_damped", {"octaves": octaves, **texts}) if octaves else ("outputs", texts)
        try:
            theirs, found = stock.do(what, **more), {name: side.do(what, **more) for name, side in others.items()}
            noise = {"embedding moved": stock.do("outputs_moved", share=MOVED, octaves=octaves, **texts)}
            if options.engine == "vllm" and octaves in in_batches and texts["sequences"] > 8:
                noise["batches of 8"] = stock.do(what, **more, at_once=8)
        except EngineError:
            if not octaves:
                raise
            continue  # a model without the parameters that say how much a sublayer adds
        for name, answers in found.items():
            levels[name][octaves] = judged(answers, theirs, noise)
    return {name: verdict(by_octaves) for name, by_octaves in levels.items()}


def judged(ours: dict[str, Any], stock: dict[str, Any], others: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """How far two answers of ``Engine.outputs`` are apart, how far the engine's ``others`` are from its first one, and
    whether ours passes: within the bounds where the engine keeps them itself, else about as far as it is."""
    found = differences(ours, stock)
    noise = {name: differences(other, stock) for name, other in others.items()}
    apply = all(other["agree"] for other in noise.values())
    limits = {"max_logprob_diff": NOISE, "mean_logprob_diff": MEAN_NOISE}
    within = all(found[k] <= factor * max(n[k] for n in noise.values()) for k, factor in limits.items())
    return {
        **found,
        "within_noise": within,
        "bounds_apply": apply,
        "passes": found["agree"] if apply else within,
        "stock_from_itself": {name: _numbers(other) for name, other in noise.items()},
    }


def verdict(levels: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """What stands in the record: the weights as they are, every damping, and ``equal``: all of them pass, and at one of
    them at least ours is within the bounds, which it has to be where the engine agrees with itself."""
    return {
        **levels[0],
        "damped": {str(octaves): level for octaves, level in levels.items() if octaves},
        "equal": all(level["passes"] for level in levels.values()) and any(level["agree"] for level in levels.values()),
    }


def _numbers(comparison: dict[str, Any]) -> dict[str, Any]:
    return {key: comparison[key] for key in ("max_logprob_diff", "mean_logprob_diff", "equal_texts")}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compare two answers of ``Engine.outputs``, each text up to the first token that differs."""
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


@dataclass(frozen=True)
class Measured:
    """One phase on one side: every round, and what the kernels of a step take."""

    rounds: list[dict[str, float]]
    kernels: dict[str, Any]

    def median(self, key: str) -> float:
        return statistics.median(one[key] for one in self.rounds)

    @property
    def gpu_ms(self) -> float:
        return sum(self.kernels["ms"].values())


def measured(sides: Mapping[str, Side], options: Options, phase: str, size: int) -> dict[str, Measured]:
    """Alternate the sides: stock, ours, ours, stock, ...; the first measurement of each is thrown away."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for i in range(options.rounds + 1):
        for name in list(sides) if i % 2 == 0 else list(sides)[::-1]:
            if phase == "prefill":
                sample = sides[name].do("prefill", tokens=size, seed=10 + i)
            else:
                sample = sides[name].do("decode", sequences=size, steps=options.steps, seed=10 + i)
            if i:
                rounds[name].append(sample)
    kernels = {name: side.do("kernels", phase=phase, size=size, steps=options.steps) for name, side in sides.items()}
    return {name: Measured(rounds[name], kernels[name]) for name in sides}


def row(found: Mapping[str, Measured], options: Options, phase: str, size: int) -> dict[str, Any]:
    """The row of the record for ``stock``, ``ours`` and whatever else was measured."""
    tokens = f"{size} tokens" if phase == "prefill" else f"{size} sequence{'s' if size > 1 else ''}"
    return {
        "model": options.name,
        "phase": f"{phase} {tokens}",
        **{name: round(one.median("ms"), 4) for name, one in found.items()},
        "unit": "ms",
        "ratio": round(found["stock"].median("ms") / found["ours"].median("ms"), 4),
        "kernels_ratio": round(found["stock"].gpu_ms / found["ours"].gpu_ms, 4),
        "rounds_ms": {name: [round(s["ms"], 4) for s in one.rounds] for name, one in found.items()},
        "wall_ms": {name: round(one.median("wall_ms"), 3) for name, one in found.items()},
        **_graphs(found),
        "gpu_ms": {name: round(one.gpu_ms, 4) for name, one in found.items()},
        "launches": {name: round(sum(one.kernels["calls"].values()), 1) for name, one in found.items()},
        "gpu_ms_by_family": {name: families.by_family(one.kernels["ms"]) for name, one in found.items()},
        "kernels": {name: _top(one.kernels) for name, one in found.items()},
    }


def _graphs(found: Mapping[str, Measured]) -> dict[str, Any]:
    """``graph_ms`` and ``graph_ratio``, if every side has times of its graph alone."""
    if not all("graph_ms" in sample for one in found.values() for sample in one.rounds):
        return {}
    ms = {name: one.median("graph_ms") for name, one in found.items()}
    return {
        "graph_ms": {name: round(value, 4) for name, value in ms.items()},
        "graph_ratio": round(ms["stock"] / ms["ours"], 4),
    }


def _phase(sides: Mapping[str, Side], options: Options, phase: str, size: int) -> dict[str, Any]:
    return row(measured(sides, options, phase, size), options, phase, size)


def _top(kernels: dict[str, Any], count: int = 40) -> list[list[Any]]:
    """The kernels that take longest: name, microseconds and calls for one step."""
    order = sorted(kernels["ms"], key=lambda name: -kernels["ms"][name])[:count]
    return [[name[:100], round(kernels["ms"][name] * 1e3, 2), round(kernels["calls"][name], 2)] for name in order]


def _write(record: dict[str, Any], file: Path | None, model: str) -> None:
    """Into the file, beside the rows of other models that it holds."""
    if file is None:
        return
    kept = json.loads(file.read_text()) if file.exists() else {}
    rows = [row for row in kept.get("rows", ()) if row["model"] != model]
    merged = {**kept, **record, "rows": rows + record["rows"]}
    for key in ("engines", "settings", "outputs", "sites", "wrong", "vllm_bench"):
        merged[key] = {**kept.get(key, {}), **record.get(key, {})}
    file.write_text(json.dumps(merged, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    graphs = f", of the graphs {row['graph_ratio']:.3f}" if "graph_ratio" in row else ""
    return (
        f"{row['model']} {row['phase']}: stock {row['stock']:.3f} ms, ours {row['ours']:.3f} ms, "
        f"ratio {row['ratio']:.3f}, of the kernels {row['kernels_ratio']:.3f}{graphs}; "
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
