"""A record as a plot: achieved bandwidth over tokens."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tk_serving.bench.implementations import OURS
from tk_serving.bench.peers import COMPILED, REFERENCE, engine_of, engines
from tk_serving.bench.record import Record, Row
from tk_serving.bench.report import variants_of

FAMILY = "{family}"


def require_matplotlib() -> None:
    """Raise ValueError, with the remedy, where plots cannot be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'tk-serving[bench]'") from error


def plot(record: Record, path: Path) -> list[Path]:
    """Achieved bandwidth over tokens, one panel for each operator and model, one line for each implementation.

    The dashed line is the copy bandwidth; the dotted one is what an empty kernel's time would allow. ``{family}`` in
    the name makes one file for each family.
    """
    families = sorted({row.family for row in record.rows})
    if FAMILY not in str(path):
        return [_plot(record, record.rows, path)] if record.rows else []
    files = []
    for family in families:
        rows = [row for row in record.rows if row.family == family]
        files.append(_plot(record, rows, Path(str(path).replace(FAMILY, family))))
    return files


def _plot(record: Record, rows: Sequence[Row], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, str], dict[str, list[Row]]] = {}
    variants = variants_of(rows)
    for row in rows:
        title = (f"{row.operator}{variants.get(row.key, '')}", row.mode)
        panels.setdefault(title, {}).setdefault(row.model, []).append(row)
    models = list(dict.fromkeys(row.model for row in rows))
    names = list(dict.fromkeys([OURS, *(peer.name for row in rows for peer in row.peers if peer.us is not None)]))
    colors = _colors(names)
    height = 2.3 * len(panels) + 1.2
    figure, axes = pyplot.subplots(
        len(panels), len(models), figsize=(3.4 * len(models) + 0.6, height), squeeze=False, layout="constrained"
    )
    for line, ((operator, mode), by_model) in enumerate(panels.items()):
        for column, model in enumerate(models):
            axis = axes[line][column]
            if model not in by_model:
                axis.axis("off")
                continue
            _panel(axis, record, by_model[model], colors)
            axis.set_title(
                f"{_wrapped(operator)}\n{model or 'any model'}{'' if mode == 'graph' else f', {mode}'}", fontsize=7
            )
            if line == len(panels) - 1:
                axis.set_xlabel("tokens", fontsize=7)
            if column == 0:
                axis.set_ylabel("GB/s", fontsize=7)
    lines = [pyplot.Line2D([], [], color=colors[n], marker="o", ms=3, lw=2.0 if n == OURS else 1.0) for n in names]
    lines += [pyplot.Line2D([], [], color="0.5", ls=style) for style in ("--", ":")]
    labels = [*names, f"copy {record.copy_gbps:.0f} GB/s", "empty kernel"]
    figure.legend(
        lines,
        labels,
        loc="outside upper center",
        ncols=min(len(labels), 2 * len(models) + 1),
        fontsize=7,
        frameon=False,
    )
    figure.supxlabel(f"{record.device}, driver {record.driver}, {record.date[:10]}, {record.revision[:12]}", fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    if path.suffix == ".png":
        _shrink(path)
    return path


def _shrink(path: Path) -> None:
    """Keep 64 colours of a picture: lines and text look the same, at a quarter of the size."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(64)
    small.save(path, optimize=True)


def _panel(axis: Any, record: Record, rows: Sequence[Row], colors: dict[str, str]) -> None:
    rows = sorted(rows, key=lambda row: row.tokens)
    tokens = [row.tokens for row in rows]
    axis.axhline(record.copy_gbps, color="0.5", ls="--", lw=0.8)
    floor = record.floors.get(rows[0].mode)
    if floor:
        axis.plot(tokens, [row.bytes / (floor * 1e3) for row in rows], color="0.5", ls=":", lw=0.8)
    for name, color in colors.items():
        points = [(row.tokens, _gbps(row, name), _spread(row, name)) for row in rows]
        known = [(count, gbps, spread) for count, gbps, spread in points if gbps is not None]
        if known:
            counts, speeds, spreads = zip(*known, strict=True)
            width = 2.0 if name == OURS else 1.0
            axis.plot(counts, speeds, color=color, marker="o", ms=3, lw=width, zorder=3 if name == OURS else 2)
            axis.fill_between(counts, [s[0] for s in spreads], [s[1] for s in spreads], color=color, alpha=0.15, lw=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [f"{count // 1024}k" if count % 1024 == 0 else str(count) for count in tokens])
    top = max([record.copy_gbps, *(speed for row in rows for name in colors if (speed := _gbps(row, name)))])
    axis.set_ylim(top=2 * top)
    axis.tick_params(labelsize=6)
    axis.minorticks_off()
    axis.grid(alpha=0.25, lw=0.5)


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Ours and other projects in colour, the same in every file; torch in grey."""
    fixed = {OURS: "C0", REFERENCE: "0.7", COMPILED: "0.45"}
    others = [name for name in names if name not in fixed]
    free = ["C4", "C1", "C2", "C8", "C3", "C9", "C5", "C6"]
    known = {engine: free[i % len(free)] for i, engine in enumerate(engines())}
    used: set[str] = set()
    for name in others:
        color = known[engine_of(name)] if engine_of(name) in known else free[0]
        fixed[name] = color if color not in used else next((c for c in free if c not in used), color)
        used.add(fixed[name])
    return {name: fixed[name] for name in names}


def _gbps(row: Row, name: str) -> float | None:
    us = _of(row, name, "us")
    return row.bytes / (us * 1e3) if us and row.bytes else None


def _spread(row: Row, name: str) -> tuple[float, float]:
    slow, fast = _of(row, name, "p90"), _of(row, name, "p10")
    return (row.bytes / ((slow or math.inf) * 1e3), row.bytes / ((fast or math.inf) * 1e3))


def _of(row: Row, name: str, what: str) -> float | None:
    source: Any = row if name == OURS else next((peer for peer in row.peers if peer.name == name), None)
    return getattr(source, what, None)


def _wrapped(text: str, width: int = 44) -> str:
    return "\n".join(textwrap.wrap(text, width))
