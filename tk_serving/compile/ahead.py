"""Building kernels ahead of time: every shape class of the chosen models, in parallel, without a GPU."""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import logging
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tk_serving
from tk_serving import environment
from tk_serving.compile import cache, kernels
from tk_serving.operator import find, operators
from tk_serving.plan import Launch


@dataclass(frozen=True)
class Job:
    """One kernel to build: named by its declaration, because launches hold functions that cannot be pickled."""

    operator: str
    label: str
    launch: str
    digest: str
    arch: str


@dataclass(frozen=True)
class Built:
    """A finished job; ``error`` is empty where it succeeded."""

    job: Job
    file: str
    seconds: float
    error: str = ""


def jobs(models: Sequence[str], archs: Sequence[str]) -> list[Job]:
    """The kernels that the models need, each once."""
    found: dict[str, Job] = {}
    for op in operators():
        wanted = [workload for workload in op.built if workload.model in models]
        for launch, label in op.shape_classes(wanted).items():
            for arch in (arch for arch in archs if arch in launch.archs):
                name = cache.digest(launch, arch)
                found.setdefault(name, Job(op.name, label, str(launch), name, arch))
    return list(found.values())


def build(
    todo: Sequence[Job], folder: pathlib.Path, workers: int, done: Callable[[Built], None] = lambda built: None
) -> list[Built]:
    """Build jobs into a cache folder with ``workers`` processes; ``done`` is told of each."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(_build, job, folder) for job in todo]
        results = []
        for future in concurrent.futures.as_completed(futures):
            results.append(future.result())
            done(results[-1])
    return results


def write_manifest(
    folder: pathlib.Path, built: Sequence[Built], models: Sequence[str], archs: Sequence[str], revision: str = ""
) -> None:
    """Describe a cache folder, so that a server can tell whether it is the right one.

    ``revision`` is for trees without git; by default that of the checkout.
    """
    entries = {
        result.job.digest: {
            "file": result.file,
            "sha256": cache.checksum(folder / result.file),
            "operator": result.job.operator,
            "launch": result.job.launch,
            "arch": result.job.arch,
        }
        for result in sorted(built, key=lambda result: result.file)
    }
    manifest = {
        "format": cache.FORMAT,
        "tk-serving": tk_serving.__version__,
        "git revision": revision or environment.revision(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "nvcc": environment.nvcc_version() or "unknown",
        "fingerprint": cache.fingerprint(),
        "models": list(models),
        "archs": list(archs),
        "kernels": entries,
    }
    (folder / cache.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def load_all(folder: pathlib.Path, arch: str) -> int:
    """Open every kernel of a prebuilt cache for one architecture, so that no call waits for the disk; their number.

    Raises:
        CacheRefusedError: the cache is not one of this installation, or a file is damaged.
    """
    entries = cache.Prebuilt(folder).manifest["kernels"].values()
    files = [folder / entry["file"] for entry in entries if entry["arch"] == arch]
    for file in files:
        kernels.opened(file)
    return len(files)


def quietly(launch: Launch, arch: str, folder: pathlib.Path) -> pathlib.Path:
    """Build one kernel into a folder, without TileLang's remarks; its file."""
    import tilelang

    tilelang.logger.setLevel(logging.ERROR)  # its import sets a level of its own
    return kernels.build(launch, arch, folder)


def _launch(job: Job) -> Launch:
    """In a worker process: the launch that a job names."""
    op = find(job.operator)
    for launch in op.shape_classes([workload for workload in op.built if workload.label == job.label]):
        if cache.digest(launch, job.arch) == job.digest:
            return launch
    raise RuntimeError(f"{job.operator}: {job.launch} is no shape class of {job.label}")


def _build(job: Job, folder: pathlib.Path) -> Built:
    start = time.perf_counter()
    try:
        file = quietly(_launch(job), job.arch, folder)
    except Exception as error:
        message = f"{type(error).__name__}: {error}".splitlines()
        return Built(job, "", time.perf_counter() - start, "\n".join(message[:40]))
    return Built(job, file.relative_to(folder).as_posix(), time.perf_counter() - start)
