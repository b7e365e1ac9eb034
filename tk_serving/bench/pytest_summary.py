"""``pytest --run-benchmark``: after the tests, the figures of the operators whose test files were run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from tk_serving.bench import machine, run
from tk_serving.operator import operators


def refusal() -> str:
    """Why benchmarks cannot run on this machine; empty if they can."""
    lacking = machine.missing()
    return f"--run-benchmark: this machine lacks {'; '.join(lacking)}" if lacking else ""


def operators_of(files: Iterable[str | Path]) -> list[str]:
    """The operators that test files are about, by their names: ``tests/moe/test_topk_gate.py`` is about topk_gate."""
    stems = {(Path(file).parent.name, Path(file).stem.removeprefix("test_")) for file in files}
    return [op.name for op in operators() if (op.family, op.name) in stems]


def summarise(files: Iterable[str | Path], console: Console) -> None:
    """Measure and show the operators of the files."""
    names = operators_of(files)
    if not names:
        console.print("--run-benchmark: none of these files is the test of an operator")
        return
    record = run.measure(run.Options(names=tuple(names)), console)
    run.report.show(record, console)
