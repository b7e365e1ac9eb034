"""``tk-serving bench``: our kernels against those of others, as a table, a record, a plot and a page."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from tk_serving.bench.record import Record
    from tk_serving.bench.run import Options

REFUSED, FOUND = 2, 1


def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Families or operators; all by default.")] = None,
    model: Annotated[str, typer.Option(help="Models, comma-separated: v3, v4-flash, v4-pro, v4.1.")] = "",
    tokens: Annotated[str, typer.Option(help="Token counts, comma-separated, instead of the workloads' own.")] = "",
    peers: Annotated[
        str, typer.Option(help="Peers, comma-separated: reference, compile, vllm, sglang, ...; 'none' for ours alone.")
    ] = "",
    mode: Annotated[str, typer.Option(help="graph (many calls), cold (one call), or both as graph,cold.")] = "graph",
    rounds: Annotated[int, typer.Option(min=2, help="Samples of each implementation of a row.")] = 16,
    site: Annotated[
        list[str] | None, typer.Option(help="ENGINE=FOLDER: run the engine in a process with FOLDER first on its path.")
    ] = None,
    chain: Annotated[str, typer.Option(help="Measure a decoder layer instead: v3, v4-flash, v3:routing, ...")] = "",
    engine: Annotated[str, typer.Option(help="Engine that a chain is compared with.")] = "vllm",
    e2e: Annotated[
        str,
        typer.Option(help="Measure a serving engine end to end instead, with the backend and without: vllm, sglang."),
    ] = "",
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model that --e2e serves.")] = 4,
    eager: Annotated[bool, typer.Option("--eager", help="With --e2e: no CUDA graphs, no torch.compile.")] = False,
    logs: Annotated[Path | None, typer.Option(help="With --e2e: folder for the logs of the engines.")] = None,
    experts: Annotated[
        Path | None, typer.Option(help="With --e2e: a record of FP4 experts in FP8, which are measured too.")
    ] = None,
    sites: Annotated[
        bool, typer.Option(help="With --e2e: compare every replaced call with the engine's own function.")
    ] = True,
    arguments: Annotated[
        str,
        typer.Option(help="With --e2e: further arguments of the engine, for both sides: a JSON object."),
    ] = "",
    one_gpu: Annotated[
        bool,
        typer.Option("--one-gpu", help="With --e2e vllm: all ranks share one GPU; outputs only, nothing is timed."),
    ] = False,
    check: Annotated[bool, typer.Option(help="Compare all results with the reference first.")] = True,
    revision: Annotated[str, typer.Option(help="Git revision for the record where there is no checkout.")] = "",
    limit: Annotated[
        float, typer.Option(min=1, show_default="none", help="Stop after the row that reaches this many seconds.")
    ] = 1e9,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that the --json file holds already.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the record to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a PNG; {family} in the name makes one for each family.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write a Markdown page.")] = None,
    causes: Annotated[
        Path | None, typer.Option(help="Why rows miss a target; by default misses.toml beside the record.")
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Show these records, merged, instead of measuring."),
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --from: operators and chains that it lacks are shown from these older records, marked."
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="OLD NEW", help="Records of two runs: show what became slower.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the rows and peers; needs no GPU.")] = False,
) -> None:
    """Measure operators against every peer that is installed here.

    Exits with 2 if it cannot measure, with 1 if a result of ours differs from the reference, a row of ours failed, or
    (--compare) something became slower.
    """
    from tk_serving.bench import run

    if e2e:
        _end_to_end(
            engine=e2e,
            models=_list(model),
            layers=layers,
            eager=eager,
            compare=sites,
            experts=experts,
            arguments=_object("--arguments", arguments),
            one_gpu=one_gpu,
            limit=limit,
            json=json,
            logs=logs,
            revision=revision,
        )
        return
    try:
        if compare is not None:
            raise typer.Exit(FOUND if run.compare(*compare) else 0)
        options = run.Options(
            names=tuple(names or ()),
            models=_list(model),
            tokens=_counts(tokens),
            peers=_list(peers),
            modes=_list(mode),
            rounds=rounds,
            sites=dict(_pair(text) for text in site or ()),
            chains=_list(chain),
            engine=engine,
            check=check,
            revision=revision,
            limit=limit,
            resume=resume,
            json=json,
        )
        if dry_run:
            run.list_rows(options)
            return
        if plot is not None:
            run.require_matplotlib()
        record = run.load(source, earlier or ()) if source else _measure(options)
        failed = run.publish(record, json, plot, page, source[0] if source and len(source) == 1 else json, causes)
    except (ValueError, OSError) as error:
        _refuse(str(error))
    raise typer.Exit(FOUND if failed else 0)


def _measure(options: Options) -> Record:
    from tk_serving.bench import machine, run

    run.validate(options)
    lacking = machine.missing()
    if lacking:
        _refuse("bench: this machine lacks " + "; ".join(lacking))
    return run.measure(options)


def _end_to_end(*, models: tuple[str, ...], **options: Any) -> None:
    from tk_serving.bench import e2e, machine

    try:
        chosen = [e2e.Options(model=name, **options) for name in models or tuple(e2e.MODELS)]
        for one in chosen:
            e2e.validate(one)
        lacking = machine.missing()
        if lacking:
            _refuse("bench: this machine lacks " + "; ".join(lacking))
        records = [e2e.run(one) for one in chosen]
    except (ValueError, OSError, e2e.EngineError) as error:
        _refuse(str(error))
    agree = [row["agree"] for record in records for row in record["rows"]]
    equal = [found["equal"] for record in records for found in record.get("outputs", {}).values()]
    raise typer.Exit(0 if all((*agree, *equal)) else FOUND)


def _refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(REFUSED)


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = loads(text or "{}")
    except ValueError as error:
        _refuse(f"bench: {name}: expected a JSON object, got {text!r}: {error}")
    if not isinstance(value, dict):
        _refuse(f"bench: {name}: expected a JSON object, got {text!r}")
    return value


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _list(text)))
    except ValueError:
        raise ValueError(f"bench: tokens: expected numbers, comma-separated, got {text!r}") from None


def _pair(text: str) -> tuple[str, str]:
    engine, separator, folder = text.partition("=")
    if not separator or not Path(folder).is_dir():
        raise ValueError(f"bench: site: expected ENGINE=FOLDER with an existing folder, got {text!r}")
    return engine, folder
