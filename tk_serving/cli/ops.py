"""``tk-serving ops``: the operators, derived from their declarations."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tk_serving.compile.targets import ARCHS
from tk_serving.operator import FAMILIES, Operator, operators

PIPED_WIDTH = 200


def row(op: Operator) -> dict[str, Any]:
    """One operator as plain data."""
    return {
        "name": op.name,
        "family": op.family,
        "phase": op.phase,
        "kernel": sorted({launch.kernel for launch in op.shape_classes()}),
        "reference": f"{op.module}:{op.name}",
        "archs": list(ARCHS),
        "workloads": list(dict.fromkeys(workload.label for workload in op.workloads)),
        "spec": op.spec,
        "summary": op.summary,
    }


def ops(
    family: Annotated[str, typer.Argument(help="Only this family: " + ", ".join(FAMILIES))] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one object for each operator.")] = False,
) -> None:
    """List the operators with their kernels and workloads."""
    if family and family not in FAMILIES:
        raise typer.BadParameter(f"expected one of {', '.join(FAMILIES)}, got {family}", param_hint="FAMILY")
    rows = [row(op) for op in operators(family or None)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    table = Table(box=None, header_style="bold")
    table.add_column("operator", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("kernels", overflow="fold")
    table.add_column("what it computes")
    for item in rows:
        kernels, summary = "\n".join(item["kernel"]), item["summary"].replace("`", "")
        table.add_row(f"{item['family']}.{item['name']}", item["phase"], kernels, summary)
    console.print(table)
