"""Compile what the tests on a GPU launch, in parallel, into the local kernel cache; needs nvcc, but no GPU.

    python tools/prebuild.py [--arch sm_90a] [--jobs 16]

Without it every worker of the tests compiles the kernels of its own cases, one after another.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

from tk_serving.compile import ahead, cache
from tk_serving.operator import Operator, operators
from tk_serving.plan import Launch
from tk_serving.workloads import Maker

_todo: list[tuple[Launch, str]] = []  # for the workers: launches hold functions, which cannot be sent to a process


def launches(op: Operator) -> Iterator[Launch]:
    """The launches of an operator's workloads, and of its cases with aligned and with misaligned inputs."""
    yield from op.shape_classes(op.built)
    for case in op.cases:
        for make in (Maker("meta"), Maker("cpu", 1, True)):
            try:
                plan = op.plan(*op.bind(*op.inputs(make, **case)))
            except ValueError:
                if not make.misalign:
                    raise
                continue  # the contract refuses misaligned tensors
            yield from () if plan.refusal else plan.launches


def lacking(arch: str) -> list[tuple[Launch, str]]:
    """Every launch whose kernel is in no cache yet, each kernel once."""
    found: dict[str, Launch] = {}
    for op in operators():
        for launch in (one for one in launches(op) if arch in one.archs):
            found.setdefault(cache.digest(launch, arch), launch)
    return [(launch, arch) for launch in found.values() if cache.find(launch, arch) is None]


def _build(index: int) -> str:
    launch, arch = _todo[index]
    try:
        ahead.quietly(launch, arch, cache.local())
    except Exception as error:
        return f"{launch}: {type(error).__name__}: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    start = time.perf_counter()
    _todo.extend(lacking(options.arch))
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        failures = [text for text in pool.imap_unordered(_build, range(len(_todo)), chunksize=1) if text]
    for text in failures:
        print(text, file=sys.stderr)
    print(f"{len(_todo) - len(failures)} of {len(_todo)} kernels compiled in {time.perf_counter() - start:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
