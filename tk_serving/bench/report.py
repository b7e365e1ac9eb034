"""A record as tables and findings in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tk_serving.bench import targets
from tk_serving.bench.agreement import CLOSE, DIFFERENT, EQUAL
from tk_serving.bench.implementations import OURS
from tk_serving.bench.record import ChainRow, Record, Row, geometric_mean

MARKS = {EQUAL: "=", CLOSE: "≈", DIFFERENT: "[red]DIFFERS[/]", None: "?"}
LEGEND = "= all equal to the reference by the operator's rule, ≈ up to rounding, ? not compared, * with the host"


def table(rows: Sequence[Row]) -> Table:
    """One line for each row: time, bandwidth, fastest peer, agreement."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in (
        "operator",
        "workload",
        "tokens",
        "us",
        "GB/s",
        "% copy",
        "fastest peer",
        "us",
        "ratio",
        "",
    ):
        shown.add_column(name, justify="left" if name in ("operator", "workload", "fastest peer", "") else "right")
    variants = variants_of(rows)
    for row in rows:
        color = "red" if row.ratio is not None and row.ratio < targets.WORST else ""
        shown.add_row(
            f"{row.operator}{variants.get(row.key, '')}",
            row.workload if row.mode == "graph" else f"{row.workload} ({row.mode})",
            str(row.tokens),
            number(row.us) + method_mark(row.method),
            number(row.gbps),
            number(row.pct_copy),
            fastest(row),
            number(row.peer_us),
            f"[{color}]{row.ratio:.2f}[/]" if row.ratio is not None and color else number(row.ratio, 2),
            f"[red]{escape(row.error)}[/]" if row.error else agreement(row),
        )
    return shown


def fastest(row: Row) -> str:
    """The fastest peer, with the time of ours beside it where another run than the row's compared them."""
    beside = next((peer.beside for peer in row.peers if peer.name == row.peer), None)
    return f"{row.peer or 'none'}{f' (ours {number(beside)})' if beside else ''}"


def agreement(row: Row) -> str:
    """The mark of the agreement, where ours and all peers have the same; else the marks that are not plain equality."""
    ran = [(OURS, row.agreement)] if row.us is not None else []
    ran += [(peer.name, peer.agreement) for peer in row.peers if peer.us is not None]
    kinds = {kind for _, kind in ran}
    if len(kinds) == 1 and kinds <= {EQUAL, None}:
        return MARKS[kinds.pop()]
    return ", ".join(f"{name} {MARKS[kind]}" for name, kind in ran if kind != EQUAL)


def chain_table(rows: Sequence[ChainRow]) -> Table:
    """One line for each chain, engine and token count."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("chain", "tokens", "us", "engine", "us", "ratio", "left out on both sides"):
        shown.add_column(name, justify="left" if name in ("chain", "engine", "left out on both sides") else "right")
    for row in rows:
        left_out = ", ".join(row.left_out)
        shown.add_row(
            *(row.chain, str(row.tokens), number(row.us), row.peer, number(row.peer_us), number(row.ratio, 2)),
            f"[red]{escape(row.error)}[/]" if row.error else left_out or "nothing",
        )
    return shown


def show(record: Record, console: Console) -> None:
    """Everything a record says, in the terminal."""
    floors = ", ".join(f"{number(value)} us ({mode})" for mode, value in record.floors.items())
    console.print(
        f"{record.device}, driver {record.driver}, {record.date}, revision {record.revision[:12]}\n"
        f"copy {record.copy_gbps:.0f} GB/s, empty kernel {floors}",
        highlight=False,
    )
    if record.rows:
        console.print(table(record.rows), highlight=False)
        console.print(LEGEND, style="dim", highlight=False)
    if record.chains:
        console.print(chain_table(record.chains), highlight=False)
    for line in (*means(record), *missed(record), *findings(record)):
        console.print(line, highlight=False, soft_wrap=True)
    if record.aborted:
        console.print(f"[red]stopped early: {escape(record.aborted)}[/]", highlight=False, soft_wrap=True)


def means(record: Record) -> list[str]:
    """Geometric means of the ratios."""
    lines = []
    for name, values in targets.ratios(record).items():
        mean = geometric_mean(values)
        if mean is not None:
            spread = f"over {len(values)} rows, worst {min(values):.2f}"
            lines.append(f"fastest peer / ours, {name}: geometric mean {mean:.2f} {spread}")
    return lines


def missed(record: Record) -> list[str]:
    """Every row that misses a target."""
    return [f"missed: {escape(str(miss))}" for miss in targets.misses(record)]


def differences(record: Record) -> list[str]:
    """Every result that did not agree, with the first difference."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in record.rows:
        for name, kind, text in _compared(row):
            if kind in (CLOSE, DIFFERENT):
                found.setdefault((kind, name, row.operator), []).append(f"{_name(row)}: {text}")
    lines = []
    for (kind, name, operator), texts in sorted(found.items(), key=lambda item: item[0][0] != DIFFERENT):
        color = "red" if kind == DIFFERENT else "yellow"
        lines.append(f"[{color}]{kind}[/]: {name}: {operator} in {len(texts)} rows; {escape(texts[0])}")
    return lines


def absences(record: Record) -> list[str]:
    """Every peer that did not run, with the reason and the number of rows."""
    lines = []
    for name, reasons in sorted(record.absent().items()):
        lines += [
            f"[dim]absent: {name} in {count} rows: {escape(reason)}[/]" for reason, count in sorted(reasons.items())
        ]
    return lines


def left_out(record: Record) -> list[str]:
    """Steps of the chains that were measured on neither side."""
    found = {(row.chain, row.peer, step): reason for row in record.chains for step, reason in row.left_out.items()}
    return [
        f"[dim]left out: {chain} against {peer}: {step}: {escape(why)}[/]" for (chain, peer, step), why in found.items()
    ]


def findings(record: Record) -> list[str]:
    """What did not agree, did not run or was left out."""
    return [
        *chain_steps(record),
        *differences(record),
        *chain_differences(record),
        *absences(record),
        *left_out(record),
    ]


def chain_differences(record: Record) -> list[str]:
    """Steps of the chains in which one side differs from the reference by more than rounding."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in record.chains:
        for step in row.steps:
            for side, name in (("ours", OURS), ("engine", row.peer)):
                if step[side] == DIFFERENT:
                    found.setdefault((row.chain, step["place"], name), []).append(str(row.tokens))
    return [
        f"[yellow]different[/]: chain {chain}: {place}: {name} at {', '.join(dict.fromkeys(counts))} tokens"
        for (chain, place, name), counts in found.items()
    ]


def chain_steps(record: Record) -> list[str]:
    """The time of each step, ours and the engine's, of the chains that were timed step by step."""
    lines = []
    for row in record.chains:
        steps = [step for step in row.steps if step.get("us")]
        if steps:
            texts = [f"{step['place']} {number(step['us'])} / {number(step['engine_us'])}" for step in steps]
            lines.append(f"chain {row.chain}, {row.tokens} tokens, us of ours / {row.peer} alone: {'; '.join(texts)}")
    return lines


def number(value: float | None, digits: int | None = None) -> str:
    """Three significant digits, or the given number of decimals; empty for None."""
    if value is None:
        return ""
    if digits is None:
        digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(digits, 3)}f}"


def _compared(row: Row) -> list[tuple[str, str | None, str]]:
    return [(OURS, row.agreement, row.difference), *((p.name, p.agreement, p.difference) for p in row.peers)]


def method_mark(method: str) -> str:
    return "*" if method == "stream" else ""


def _name(row: Row) -> str:
    return f"{row.operator} {row.workload} tokens={row.tokens}"


def variants_of(rows: Iterable[Row]) -> dict[tuple, str]:
    """What tells rows apart that have the same operator, workload, tokens and mode."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.workload, row.tokens, row.mode), []).append(row)
    found = {}
    for same in groups.values():
        for row in same if len(same) > 1 else ():
            own = {k: v for k, v in row.params.items() if any(other.params.get(k) != v for other in same)}
            found[row.key] = f" ({', '.join(f'{k}={v}' for k, v in own.items())})" if own else ""
    return found
