"""A record as a page of the documentation; every number on it comes from the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from tk_serving.bench import targets
from tk_serving.bench.record import ChainRow, Record, Row
from tk_serving.bench.report import (
    absences,
    agreement,
    chain_differences,
    chain_steps,
    differences,
    fastest,
    left_out,
    means,
    method_mark,
    number,
    variants_of,
)


def page(record: Record, source: str, plots: Sequence[str] = (), causes: Sequence[targets.Cause] = ()) -> str:
    """The record as Markdown; every number comes from it.

    Args:
        record: what was measured.
        source: the file of the record, as the page names it.
        plots: image files, relative to the page.
        causes: why rows miss their targets.
    """
    floors = ", ".join(f"{number(value)} µs ({mode})" for mode, value in record.floors.items())
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    parts = [
        "# Performance\n",
        f"Generated from `{source}` by `tk-serving bench --from {source} --page FILE`; do not edit.\n",
        f"{record.device}, driver {record.driver}, {record.date[:10]}, revision `{record.revision[:12]}`.\n",
        f"{versions}.\n",
        f"Copy bandwidth in the same run: {record.copy_gbps:.0f} GB/s. Empty kernel: {floors}.\n",
        f"{record.method}\n",
    ]
    for origin in dict.fromkeys(record.earlier.values()):
        names = ", ".join(f"`{name}`" for name, of in record.earlier.items() if of == origin)
        parts.append(f"Not measured in this run, shown from an earlier one (revision {origin}): {names}.\n")
    lines = [_plain_markup(line) for line in means(record)]
    if lines:
        parts += ["## Summary\n", _bullets(lines)]
    parts += ["## Rows that miss a target\n", _misses_markdown(record, causes)]
    if record.chains:
        parts += ["## One decoder layer\n", _chain_markdown(record.chains)]
        remarks = [*left_out(record), *chain_steps(record), *chain_differences(record)]
        parts += [_bullets(map(_plain_markup, remarks))] if remarks else []
    for family in dict.fromkeys(row.family for row in record.rows):
        parts.append(f"## {family}\n")
        parts += [f"![Achieved bandwidth of {family}]({name})\n" for name in plots if family in Path(name).stem]
        parts.append(_rows_markdown([row for row in record.rows if row.family == family]))
    for title, found in (("Differences", differences(record)), ("Absent peers", absences(record))):
        if found:
            parts += [f"## {title}\n", _bullets(map(_plain_markup, found))]
    return "\n".join(parts)


def _rows_markdown(rows: Sequence[Row]) -> str:
    heads = ("operator", "workload", "tokens", "µs", "GB/s", "% copy", "fastest peer", "µs", "ratio", "agreement")
    variants = variants_of(rows)
    cells = [
        (
            f"{row.operator}{variants.get(row.key, '')}",
            row.workload if row.mode == "graph" else f"{row.workload} ({row.mode})",
            row.tokens,
            number(row.us) + method_mark(row.method).replace("*", "\\*"),
            *(number(row.gbps), number(row.pct_copy)),
            *(fastest(row), number(row.peer_us), number(row.ratio, 2)),
            row.error or _plain_markup(agreement(row)),
        )
        for row in rows
    ]
    return _markdown(heads, cells, "llrrrrlrrl")


def _misses_markdown(record: Record, causes: Sequence[targets.Cause]) -> str:
    wanted = (
        f"Targets: geometric mean of the ratios at least {targets.MEAN:.2f}; no row below {targets.WORST}; pure data "
        f"movement of {targets.COPY_TOKENS} tokens or more at {targets.COPY_PERCENT:g} % of the copy bandwidth; "
        f"a decoder layer at least {targets.CHAIN} times as fast as the engine's kernels.\n\n"
    )
    found = targets.explain(targets.misses(record), causes)
    if not found:
        return f"{wanted}None.\n"
    known = dict.fromkeys(cause for _, cause in found if cause != targets.UNKNOWN)
    numbers = {cause: f"({i})" for i, cause in enumerate(known, 1)}
    cells = [
        (*(miss.name, miss.target, number(miss.value), f"{miss.wanted:g}", miss.against), numbers.get(cause, cause))
        for miss, cause in found
    ]
    table = _markdown(("row", "target", "measured", "wanted", "against", "cause"), cells, "llrrll")
    return wanted + table + "".join(f"\n{sign} {cause}\n" for cause, sign in numbers.items())


def _chain_markdown(rows: Sequence[ChainRow]) -> str:
    heads = ("chain", "tokens", "µs", "engine", "µs", "ratio", "left out on both sides")
    cells = [
        (
            *(row.chain, row.tokens, number(row.us), row.peer, number(row.peer_us), number(row.ratio, 2)),
            row.error or ", ".join(row.left_out) or "nothing",
        )
        for row in rows
    ]
    return _markdown(heads, cells, "lrrlrrl")


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]], sides: str) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join('---:' if side == 'r' else '---' for side in sides)}|"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _plain_markup(text: str) -> str:
    return Text.from_markup(text).plain
