"""A real server with the backend and the same server without it, compared over HTTP."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tk_serving.demo import checkpoint, compare, engines
from tk_serving.demo.server import Server, ServerError

LIMIT = 2e-2
"""Largest accepted difference of log-probabilities between the two servers, both in bf16."""


class DemoError(RuntimeError):
    """What the demo was to show did not happen."""


@dataclass
class Demo:
    """One run of the demo.

    Attributes:
        engine: the serving engine; one of ``engines.NAMES``.
        model: the tiny model; ``v3``.
        tokens: tokens to generate for each prompt.
        port: port of the servers on 127.0.0.1; 0 for any that is free.
        simulate: on a machine without a GPU, run the generated CUDA of the operators in the simulator.
        folder: where the checkpoint and the logs go.
        console: where to print.
    """

    engine: str
    model: str
    tokens: int
    port: int
    simulate: bool
    folder: Path
    console: Console
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    servers: list[Server] = field(default_factory=list)

    def run(self) -> None:
        """Compare the two servers.

        Raises:
            DemoError: an operator did not run, or the servers disagree.
            ServerError: a server did not start, or failed.
        """
        self._check_options()
        checkpoint.write(self.model, self.folder / "model")
        architecture = checkpoint.config(self.model)["architectures"][0]
        label = self._engine.LABEL
        self.console.print(f"A tiny {architecture} in bf16 on {self.device}, served by {label}.")
        ours, calls = self._serve("tilekernels", f"{label} with --kernel-backend tilekernels")
        theirs, none = self._serve("auto", f"{label} without the flag")
        difference = compare.largest_difference(ours, theirs)
        self.console.print(_texts_table(ours, theirs))
        self.console.print(f"\nLargest logprob difference: {difference:.4f} (limit {LIMIT})\n")
        self.console.print(_calls_table(calls))
        self._judge(difference, calls, none)

    @property
    def _engine(self) -> ModuleType:
        return engines.find(self.engine)

    def _check_options(self) -> None:
        if self.engine not in engines.NAMES:
            raise DemoError(f"engine {self.engine!r}: expected one of {', '.join(engines.NAMES)}")
        if self.model not in checkpoint.MODELS:
            raise DemoError(f"model {self.model!r}: expected one of {', '.join(checkpoint.MODELS)}")
        if importlib.util.find_spec(self._engine.PACKAGE) is None:
            raise DemoError(f"{self._engine.LABEL} is not installed; make demo ENGINE={self.engine} installs it")
        self.simulate = self.simulate and self.device == "cpu"

    def _serve(self, backend: str, name: str) -> tuple[list[compare.Completion], list[dict[str, Any]]]:
        """Completions of one server, and its counted calls."""
        path = self.folder / "model"
        engine = self._engine
        arguments = engine.arguments(path, self.model, self.device, self.simulate)
        if backend != "auto":
            arguments += ["--kernel-backend", backend]
        allowed = checkpoint.printable(path)
        completions = []
        with _progress(self.console, name) as show:
            log = self.folder / f"{backend}.log"
            server = Server(arguments, log, self._environment(backend), self.port, show, engine.SERVER)
            self.servers.append(server)
            with server:
                for i, prompt in enumerate(compare.PROMPTS):
                    show(f"prompt {i + 1} of {len(compare.PROMPTS)}")
                    completions.append(engine.complete(server, self.model, prompt, self.tokens, allowed))
                show("reading /metrics")
                calls = _settled_calls(server)
                show("shutting down")
        return completions, calls

    def _environment(self, backend: str) -> dict[str, str]:
        environment = self._engine.environment(self.device)
        environment["TK_SERVING_KERNEL_BACKEND"] = "auto"  # only the flag decides
        environment["TK_SERVING_STATE_DIR"] = str(self.folder / "state") if backend != "auto" else ""
        environment["TK_SERVING_CPU"] = "simulator" if self.simulate else "reference"
        return environment

    def _judge(self, difference: float, calls: list[dict[str, Any]], none: list[dict[str, Any]]) -> None:
        if none:
            raise DemoError("the server without the flag counted calls of tk-serving")
        ran = {row["operator"] for row in calls if row["implementation"] != "engine" and row["calls"]}
        missing = [name for name in self._engine.EXPECTED[self.device] if name not in ran]
        if missing:
            raise DemoError(f"no calls of {', '.join(missing)}")
        if self.simulate and not any(row["implementation"] == "simulator" for row in calls):
            raise DemoError("no operator ran in the simulator")
        if not difference <= LIMIT:
            raise DemoError(f"the largest logprob difference is {difference:.4f}, above {LIMIT}")


def run(
    *,
    engine: str = "vllm",
    model: str = "v3",
    tokens: int = 16,
    port: int = 0,
    keep: bool = False,
    simulate: bool = False,
) -> int:
    """Run the demo; return the exit code. The last line printed is ``demo: OK`` or ``demo: FAILED <why>``.

    The options are those of :class:`Demo`; ``keep`` keeps the checkpoint and the logs, and says where.
    """
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="tk-serving-demo-"))
    demo = Demo(engine, model, tokens, port, simulate, folder, console)
    failure = ""
    try:
        with _terminate_as_interrupt():
            demo.run()
    except KeyboardInterrupt:
        failure = "interrupted"
    except (DemoError, ServerError) as error:
        failure = str(error)
        for server in demo.servers:
            console.rule(f"end of {server.log.name}")
            console.print("\n".join(server.last_lines), markup=False)
        console.rule()
    finally:
        if keep:
            console.print(f"checkpoint and logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    console.print(f"demo: FAILED {failure}" if failure else "demo: OK", markup=False)
    return 1 if failure else 0


def _settled_calls(server: Server) -> list[dict[str, Any]]:
    """The counters, once the workers have written all calls: they do so every second."""
    rows = compare.calls(server.get("/metrics"))
    for _ in range(10):
        time.sleep(1.5)
        before, rows = rows, compare.calls(server.get("/metrics"))
        if rows == before:
            break
    return rows


def _texts_table(ours: Sequence[compare.Completion], theirs: Sequence[compare.Completion]) -> Table:
    table = Table("prompt", "with --kernel-backend tilekernels", "without the flag", title="Completions")
    for prompt, a, b in zip(compare.PROMPTS, ours, theirs, strict=True):
        table.add_row(prompt, a.text, b.text)
    return table


def _calls_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("operator", "calls", "implementation", "reason", title="Calls, from the server's /metrics")
    table.columns[1].justify = "right"
    for row in rows:
        table.add_row(row["operator"], str(row["calls"]), row["implementation"], row["reason"])
    return table


@contextlib.contextmanager
def _progress(console: Console, name: str) -> Iterator[Callable[[str], None]]:
    """A spinner with the elapsed time and what is going on; one line where the output is no terminal."""
    if not console.is_terminal:
        console.print(f"{name} ...")
        yield lambda text: None
        return
    text = TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("{task.fields[now]}", markup=False)
    with Progress(SpinnerColumn(), *text, console=console) as progress:
        task = progress.add_task(name, now="", total=None)
        yield lambda now: progress.update(task, now=now[-max(20, console.width - len(name) - 20) :])
        progress.update(task, now="done")


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the demo like Ctrl-C, so that its servers end with it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
