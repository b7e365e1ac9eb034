"""``tk-serving build``: kernels ahead of time, so that serving never waits for a compiler."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tk_serving import environment
from tk_serving.compile.targets import ARCHS
from tk_serving.workloads import MODELS

KEYS = [model.key for model in MODELS]
NAMES = [*KEYS, "v3.2"]


def build(
    out: Annotated[pathlib.Path, typer.Option("--out", help="Folder of the new cache.")],
    arch: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(ARCHS)}.")] = ARCHS[0],
    model: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(NAMES)}.")] = ",".join(KEYS),
    revision: Annotated[str, typer.Option(help="Git revision for the manifest where there is no checkout.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Parallel compilations.")] = os.cpu_count() or 1,
) -> None:
    """Build every kernel that the models need, without a GPU, into a folder for TK_SERVING_KERNEL_CACHE."""
    from tk_serving.compile import ahead

    archs = _choices("--arch", arch, ARCHS)
    models = _choices("--model", model, NAMES)
    models = list(dict.fromkeys("v3" if name == "v3.2" else name for name in models))  # V3.2 has V3's shapes
    if not environment.nvcc():
        raise typer.BadParameter(
            "expected a CUDA compiler: put nvcc on PATH, set CUDA_HOME, or "
            "pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' "
            "'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-crt==13.0.*'",
            param_hint="nvcc",
        )
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    start = time.perf_counter()
    todo = ahead.jobs(models, archs)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("building", total=len(todo))
        results = ahead.build(todo, out, jobs, lambda built: progress.advance(task))
    failed = [result for result in results if result.error]
    for result in failed:
        console.print(
            f"[red]failed[/] {result.job.launch} {result.job.arch}: {result.error}", highlight=False, markup=True
        )
    if failed:
        console.print(f"{len(failed)} of {len(todo)} kernels failed: no manifest was written")
        raise typer.Exit(1)
    ahead.write_manifest(out, results, models, archs, revision)
    size = sum((out / result.file).stat().st_size for result in results)
    console.print(
        f"{len(results)} kernels, {size / 1e6:.1f} MB, {time.perf_counter() - start:.0f} s; "
        f"use them with TK_SERVING_KERNEL_CACHE={out.resolve()}"
    )


def _choices(option: str, text: str, allowed: list[str] | tuple[str, ...]) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    for part in chosen:
        if part not in allowed:
            raise typer.BadParameter(f"expected {', '.join(allowed)}, got {part}", param_hint=option)
    return chosen
