"""One benchmark from options to record, and a record to everything that is made of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tk_serving.bench import chain as chains
from tk_serving.bench import compare as comparing
from tk_serving.bench import record as records
from tk_serving.bench import report, targets
from tk_serving.bench.agreement import DIFFERENT
from tk_serving.bench.implementations import Bench, DeviceLostError
from tk_serving.bench.page import page as make_page
from tk_serving.bench.peers import TORCH, engines
from tk_serving.bench.plot import plot as make_plot
from tk_serving.bench.plot import require_matplotlib
from tk_serving.bench.record import Record
from tk_serving.bench.selection import Task, select
from tk_serving.bench.suite import NO_PEERS, Suite, row_of
from tk_serving.bench.timing import GRAPH, MODES, CudaTimer, DeviceTimer, HostTimer
from tk_serving.environment import revision

SAVE_EVERY_SECONDS = 20.0

__all__ = ["Options", "compare", "list_rows", "load", "measure", "publish", "require_matplotlib", "validate"]


@dataclass(frozen=True)
class Options:
    """What to measure; see ``tk-serving bench --help``."""

    names: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    modes: tuple[str, ...] = (GRAPH,)
    rounds: int = 16
    sites: Mapping[str, str] = field(default_factory=dict)
    chains: tuple[str, ...] = ()
    engine: str = "vllm"
    check: bool = True
    revision: str = ""
    limit: float = math.inf
    resume: bool = False
    json: Path | None = None


def validate(options: Options) -> list[Task]:
    """The rows of the options.

    Raises:
        ValueError: an option names something unknown.
    """
    known = [*TORCH, *engines()]
    _known("peers", options.peers, [*known, NO_PEERS])
    _known("site", tuple(options.sites), engines())
    _known("mode", options.modes, MODES)
    _known("chain", options.chains, list(chains.CHAINS))
    _known("engine", (options.engine,), engines())
    if not options.modes:
        raise ValueError(f"bench: mode: expected some of {', '.join(MODES)}, got none")
    if any(count < 1 for count in options.tokens):
        raise ValueError(f"bench: tokens: expected positive numbers, got {min(options.tokens)}")
    if options.chains:
        return []
    tasks = select(options.names, options.models, options.tokens)
    known_rows = {row.key for record in earlier(options) for row in record.rows}
    tasks = [task for task in tasks if not all(row_of(task, mode).key in known_rows for mode in options.modes)]
    if not tasks and not known_rows:
        raise ValueError(f"bench: model: expected a model that the operators have workloads of, got {options.models}")
    return tasks


def earlier(options: Options) -> list[Record]:
    """With ``resume``, what the file of the record already holds."""
    return [Record.load(options.json)] if options.resume and options.json is not None and options.json.exists() else []


def measure(
    options: Options, console: Console | None = None, timer: DeviceTimer | None = None, device: str = "cuda"
) -> Record:
    """Run the benchmark. The record is saved now and then, so a run that is lost keeps its rows.

    Args:
        options: what to measure.
        console: for the progress bar.
        timer: in place of the one of the current CUDA device.
        device: on which the inputs are made.

    Raises:
        ValueError: an option names something unknown, or the record to resume is of another machine or revision.
    """
    import torch

    tasks = validate(options)
    console = console or Console()
    started = time.monotonic()
    with torch.no_grad():
        timer = timer or CudaTimer()
        copy_gbps = timer.copy_gbps(options.rounds).median  # first: brings the clocks up
        floors = {mode: timer.floor_us(mode, options.rounds).median for mode in dict.fromkeys((GRAPH, *options.modes))}
        record = Record(
            device="CPU" if device == "cpu" else torch.cuda.get_device_name(),
            driver=records.driver(),
            versions=records.versions(),
            revision=options.revision or revision(),
            date=records.today(),
            copy_gbps=copy_gbps,
            floor_us=floors[GRAPH],
            floors=floors,
            l2_bytes=timer.l2_bytes,
        )
        records.merge([*earlier(options), record])  # refuses now rather than after the measurement
        bench = Bench(timer, device, options.check)
        suite = Suite(bench, copy_gbps, options.peers, options.sites, options.rounds)
        try:
            if options.chains:
                _measure_chains(options, bench, record, console, started)
            else:
                _measure_rows(tasks, options, suite, record, console, started)
        except (DeviceLostError, TimeoutError) as ended:
            record.aborted = str(ended)
        except KeyboardInterrupt:
            record.aborted = "interrupted"
        finally:
            record.versions |= suite.versions()
            suite.close()
    return records.merge([*earlier(options), record])


def publish(
    record: Record,
    json: Path | None,
    plot: Path | None,
    page: Path | None,
    source: Path | None,
    causes: Path | None = None,
) -> bool:
    """Show the record and write the files; whether something of ours failed or differed.

    Args:
        record: what was measured.
        json: the file to save it to.
        plot: the file, or files with ``{family}`` in the name, of the plots.
        page: the file of the Markdown page.
        source: the file that the page names as its source.
        causes: why rows miss their targets; by default ``misses.toml`` beside the source, if there is one.
    """
    console = Console()
    report.show(record, console)
    plots: list[Path] = []
    if json is not None:
        record.save(json)
        console.print(f"record: {json}", highlight=False)
    if plot is not None:
        plots = make_plot(record, plot)
        console.print(f"plots: {', '.join(str(path) for path in plots) or 'nothing to plot'}", highlight=False)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        beside = [_relative(path, page) for path in plots]
        known = _causes(causes, source)
        page.write_text(make_page(record, str(source or "the last run"), beside, known))
        console.print(f"page: {page}", highlight=False)
        for line in _unsettled(record, known):
            console.print(line, highlight=False, soft_wrap=True)
    failed = [row for row in record.rows if row.error or row.agreement == DIFFERENT]
    return bool(record.aborted or failed or any(row.error or row.equal is False for row in record.chains))


def load(paths: Sequence[Path], before: Sequence[Path] = ()) -> Record:
    """One record from files that hold parts of it; operators without a row are filled in from earlier records."""
    record = records.merge([Record.load(path) for path in paths])
    for path in before:
        record = records.complete(record, Record.load(path))
    return record


def compare(old: Path, new: Path, console: Console | None = None) -> bool:
    """Show what changed between two records; whether something became slower."""
    console = console or Console()
    found = comparing.compare(Record.load(old), Record.load(new))
    for warning in found.warnings:
        console.print(f"[yellow]not the same: {warning}[/]", highlight=False)
    console.print(comparing.table(found), highlight=False)
    console.print(comparing.summary(found), highlight=False)
    for title, names in (("only in the old record", found.only_old), ("only in the new record", found.only_new)):
        if names:
            console.print(f"[dim]{title}: {len(names)} rows, such as {names[0]}[/]", highlight=False)
    return bool(found.regressions)


def list_rows(options: Options, console: Console | None = None) -> None:
    """Print the rows that would be measured, and the peers that the operators declare."""
    from rich.table import Table

    console = console or Console()
    tasks = validate(options)
    suite = Suite(Bench(HostTimer(), "cpu"), 1.0, options.peers)
    shown = Table("operator", "workload", "tokens", "peers", box=None, header_style="bold", pad_edge=False)
    lines: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        lines.setdefault((task.op.qualified_name, task.workload.label), []).append(task)
    for (operator, label), same in lines.items():
        counts = ", ".join(str(count) for count in dict.fromkeys(task.tokens for task in same))
        shown.add_row(operator, label, counts, ", ".join(suite.peers_of(same[0])) or NO_PEERS)
    if tasks or not options.chains:
        console.print(shown, highlight=False)
        console.print(f"{len(tasks) * len(options.modes)} rows", highlight=False)
    for name in options.chains:
        for step in chains.CHAINS[name]:
            console.print(f"{name}: {step.place}: {', '.join(part.operator for part in step.parts)}", highlight=False)


def _causes(causes: Path | None, source: Path | None) -> list[targets.Cause]:
    if causes is not None:
        return targets.load(causes)
    beside = source.parent / "misses.toml" if source is not None else None
    return targets.load(beside) if beside is not None and beside.exists() else []


def _unsettled(record: Record, causes: Sequence[targets.Cause]) -> Iterator[str]:
    """Misses without a cause, and causes without a miss."""
    missed = targets.misses(record)
    unknown = [miss for miss, cause in targets.explain(missed, causes) if cause == targets.UNKNOWN]
    if unknown:
        yield f"{targets.UNKNOWN} of {len(unknown)} of {len(missed)} misses, such as {escape(str(unknown[0]))}"
    for cause in targets.stale(missed, causes):
        yield f"explains no miss any more: {escape(cause.cause)}"


def _measure_rows(
    tasks: Sequence[Task], options: Options, suite: Suite, record: Record, console: Console, started: float
) -> None:
    saved = time.monotonic()
    with _progress(console, len(tasks) * len(options.modes)) as advance:

        def seen(row: records.Row) -> None:
            nonlocal saved
            record.rows.append(row)
            advance(f"{row.operator} {row.workload} tokens={row.tokens}")
            if options.json is not None and time.monotonic() - saved > SAVE_EVERY_SECONDS:
                records.merge([*earlier(options), record]).save(options.json)
                saved = time.monotonic()
            _in_time(options, started)

        suite.run(tasks, options.modes, seen)


def _measure_chains(options: Options, bench: Bench, record: Record, console: Console, started: float) -> None:
    counts = options.tokens or chains.TOKENS
    known = {row.key for part in earlier(options) for row in part.chains}
    todo = [(name, count) for name in options.chains for count in counts if (name, options.engine, count) not in known]
    with _progress(console, len(todo)) as advance:
        for name, count in todo:
            record.chains.append(chains.Chain(name, options.engine, count, bench).measure(options.rounds))
            advance(f"{name} tokens={count}")
            bench.finish()
            if options.json is not None:
                records.merge([*earlier(options), record]).save(options.json)
            _in_time(options, started)


def _in_time(options: Options, started: float) -> None:
    if time.monotonic() - started > options.limit:
        raise TimeoutError(f"the limit of {options.limit:g} s is reached; --resume measures the rest")


@contextmanager
def _progress(console: Console, total: int) -> Iterator:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def _known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"bench: {option}: expected some of {', '.join(known)}, got {name!r}")


def _relative(path: Path, page: Path) -> str:
    import os

    return os.path.relpath(path, page.parent)
