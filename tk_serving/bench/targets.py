"""What the suite is held to, the rows that miss it, and their causes.

A file of causes has one table for each of them, in the order of their precedence::

    [[miss]]
    operator = "moe.expand_*"       # a glob; of a chain its name: "chain v3"
    workload = "*-prefill"          # a glob; all by default
    tokens = [4096, 8192]           # a number, a glob, or a list of those; all by default
    target = "ratio"                # ratio, copy, chain or mean; all by default
    cause = "why, with what was measured to find out"
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tk_serving.bench.peers import TORCH
from tk_serving.bench.record import Record, Row, geometric_mean
from tk_serving.operator import find

MEAN, WORST, CHAIN = 1.20, 0.95, 1.25
COPY_PERCENT, COPY_TOKENS = 90.0, 4096
TARGETS = ("ratio", "copy", "chain", "mean")
UNKNOWN = "cause not established"


@dataclass(frozen=True)
class Miss:
    """A row, a chain or the suite that misses a target.

    Attributes:
        target: ``ratio`` (fastest peer over ours), ``copy`` (% of the copy bandwidth), ``chain`` or ``mean``.
        value, wanted: what was measured and what was wanted.
        against: the fastest peer, or what the value refers to.
    """

    target: str
    operator: str
    workload: str
    tokens: int | None
    value: float
    wanted: float
    against: str

    @property
    def name(self) -> str:
        tokens = "" if self.tokens is None else f"tokens={self.tokens}"
        return " ".join(part for part in (self.operator, self.workload, tokens) if part)

    def __str__(self) -> str:
        unit = "% of the copy bandwidth" if self.target == "copy" else f" against {self.against}"
        return f"{self.name}: {self.value:.3g}{unit} instead of {self.wanted:g}"


@dataclass(frozen=True)
class Cause:
    """One table of a file of causes."""

    cause: str
    operator: str = "*"
    workload: str = "*"
    tokens: Any = "*"
    target: str = "*"

    def explains(self, miss: Miss) -> bool:
        tokens = self.tokens if isinstance(self.tokens, list) else [self.tokens]
        return (
            fnmatchcase(miss.operator, self.operator)
            and fnmatchcase(miss.workload, self.workload)
            and fnmatchcase(miss.target, self.target)
            and any(fnmatchcase("" if miss.tokens is None else str(miss.tokens), str(one)) for one in tokens)
        )


def load(path: Path) -> list[Cause]:
    """Read a file of causes.

    Raises:
        ValueError: not of that form; the message names the file and the table.
    """
    try:
        tables = tomllib.loads(path.read_text()).get("miss", [])
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    causes = []
    for number, table in enumerate(tables, 1):
        unknown = table.keys() - Cause.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"{path}: miss {number}: expected {', '.join(Cause.__dataclass_fields__)}, got {unknown}")
        if not str(table.get("cause", "")).strip():
            raise ValueError(f"{path}: miss {number}: cause: expected a text, got none")
        if table.get("target", "*") not in (*TARGETS, "*"):
            raise ValueError(f"{path}: miss {number}: target: expected one of {', '.join(TARGETS)}")
        causes.append(Cause(**table))
    return causes


def misses(record: Record) -> list[Miss]:
    """Everything in a record that misses a target, the suite first."""
    found = []
    for name, values in ratios(record).items():
        mean = geometric_mean(values)
        if mean is not None and mean < MEAN:
            found.append(Miss("mean", "the suite", "", None, mean, MEAN, name))
    for chain in record.chains:
        if chain.ratio is not None and chain.ratio < CHAIN:
            found.append(Miss("chain", f"chain {chain.chain}", "", chain.tokens, chain.ratio, CHAIN, chain.peer))
    moving: dict[str, bool] = {}
    for row in record.rows:
        place = (row.operator, row.workload, row.tokens)
        if row.ratio is not None and row.ratio < WORST:
            found.append(Miss("ratio", *place, row.ratio, WORST, row.peer or ""))
        if row.operator not in moving:
            moving[row.operator] = _moves_data(row.operator)
        if moving[row.operator] and row.tokens >= COPY_TOKENS and (row.pct_copy or 100.0) < COPY_PERCENT:
            found.append(Miss("copy", *place, row.pct_copy or 0.0, COPY_PERCENT, "copy bandwidth"))
    return found


def ratios(record: Record) -> dict[str, list[float]]:
    """Fastest peer over ours, of all rows that have one: against every peer, and against other projects' kernels."""
    rows = [row for row in record.rows if row.ratio]
    engines = [ratio for row in rows if (ratio := engine_ratio(row))]
    return {"every peer": [row.ratio for row in rows if row.ratio], "kernels of other projects": engines}


def engine_ratio(row: Row) -> float | None:
    """Fastest kernel of another project over ours: without the torch references."""
    found = [row.ratio_to(peer) for peer in row.peers if peer.name not in TORCH]
    return min((ratio for ratio in found if ratio is not None), default=None)


def explain(missed: Iterable[Miss], causes: Sequence[Cause]) -> list[tuple[Miss, str]]:
    """Each miss with its cause; ``UNKNOWN`` where none applies."""
    return [(miss, next((cause.cause for cause in causes if cause.explains(miss)), UNKNOWN)) for miss in missed]


def stale(missed: Sequence[Miss], causes: Sequence[Cause]) -> list[Cause]:
    """Causes of what is missed no longer."""
    return [cause for cause in causes if not any(cause.explains(miss) for miss in missed)]


def _moves_data(operator: str) -> bool:
    try:
        return find(operator).moves_data
    except ValueError:  # of a record of another version
        return False
