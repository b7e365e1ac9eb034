"""Two records side by side: what became slower."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from tk_serving.bench.record import Record, geometric_mean
from tk_serving.bench.report import number

TOLERANCE = 0.05


@dataclass(frozen=True)
class Change:
    """One row in both records. ``change`` is new time over old time."""

    name: str
    old_us: float
    new_us: float
    apart: bool  # the spreads (p10 to p90) do not touch

    @property
    def change(self) -> float:
        return self.new_us / self.old_us

    @property
    def regression(self) -> bool:
        """Slower by more than the tolerance and by more than the noise."""
        return self.change > 1 + TOLERANCE and self.apart

    @property
    def improvement(self) -> bool:
        return self.change < 1 / (1 + TOLERANCE) and self.apart


@dataclass(frozen=True)
class Comparison:
    """Rows of both records, the names of those in one of them only, and what makes the times incomparable."""

    changes: list[Change]
    only_old: list[str]
    only_new: list[str]
    warnings: list[str]

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.regression]


def compare(old: Record, new: Record) -> Comparison:
    """Match the rows and chains of two records by operator, workload, parameters, tokens and mode."""
    before, after = _timed(old), _timed(new)
    changes = []
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        apart = (b[1] or b[0]) > (a[2] or a[0]) or (b[2] or b[0]) < (a[1] or a[0])
        changes.append(Change(key, a[0], b[0], apart))
    warnings = [
        f"{name}: {getattr(old, name)} then {getattr(new, name)}"
        for name in ("device", "driver")
        if getattr(old, name) != getattr(new, name)
    ]
    if abs(new.copy_gbps / old.copy_gbps - 1) > TOLERANCE:
        warnings.append(f"copy bandwidth: {old.copy_gbps:.0f} then {new.copy_gbps:.0f} GB/s")
    return Comparison(
        sorted(changes, key=lambda change: -change.change),
        sorted(before.keys() - after.keys()),
        sorted(after.keys() - before.keys()),
        warnings,
    )


def table(comparison: Comparison) -> Table:
    """Slower rows first; changes inside the noise are left out."""
    shown = Table("row", box=None, header_style="bold", pad_edge=False)
    for name in ("old us", "new us", "new / old"):
        shown.add_column(name, justify="right")
    shown.add_column("")
    for change in comparison.changes:
        verdict = "[red]slower[/]" if change.regression else "[green]faster[/]" if change.improvement else ""
        if verdict:
            shown.add_row(change.name, number(change.old_us), number(change.new_us), f"{change.change:.2f}", verdict)
    return shown


def summary(comparison: Comparison) -> str:
    """One line: counts and the mean change."""
    mean = geometric_mean([change.change for change in comparison.changes])
    faster = sum(change.improvement for change in comparison.changes)
    slower = len(comparison.regressions)
    overall = f", new / old geometric mean {mean:.3f}" if mean else ""
    return f"{len(comparison.changes)} rows in both: {slower} slower, {faster} faster{overall}"


def _timed(record: Record) -> dict[str, tuple[float, float | None, float | None]]:
    found = {}
    for row in record.rows:
        if row.us is not None:
            operator, workload, params, tokens, mode = row.key
            found[f"{operator} {workload} tokens={tokens} {mode} {params}"] = (row.us, row.p10, row.p90)
    for chain in record.chains:
        if chain.us is not None:
            found[f"chain {chain.chain} against {chain.peer} tokens={chain.tokens}"] = (chain.us, chain.p10, chain.p90)
    return found
