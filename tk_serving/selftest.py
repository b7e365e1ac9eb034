"""A second of every family on this machine: its kernels against the torch references, on inputs of real models."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tk_serving import dispatch
from tk_serving.bench.agreement import DIFFERENT, compare, written
from tk_serving.bench.inputs import copy_arguments
from tk_serving.compile import kernels
from tk_serving.config import settings
from tk_serving.operator import Operator, operators
from tk_serving.workloads import Maker

BUDGET_S = 1.0
"""No further operator of a family is started after this time; the first one always runs."""


@dataclass(frozen=True)
class Outcome:
    """What the test of one family found.

    Attributes:
        family: its name.
        tested: names of the operators that ran.
        seconds: that it took, compilations included.
        failure: what is wrong; empty if nothing is.
    """

    family: str
    tested: tuple[str, ...]
    seconds: float
    failure: str = ""


def implementation() -> tuple[str, str]:
    """What runs kernels here, and the device of its tensors; empty where nothing does.

    ``("kernel", "cuda")`` on a GPU, ``("simulator", "cpu")`` on a machine with g++ and the CUDA headers.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= dispatch.MIN_CAPABILITY:
        return dispatch.KERNEL, "cuda"
    if shutil.which("g++") is None:
        return "", ""
    from tk_serving.simulator import toolchain
    from tk_serving.simulator.errors import SimulationError

    try:
        toolchain.cuda_includes()
    except SimulationError:
        return "", ""
    return dispatch.SIMULATOR, "cpu"


def run(family: str, how: str, device: str, budget: float = BUDGET_S) -> Outcome:
    """Test operators of one family, those of inference first, until the time is used up.

    Args:
        family: its name.
        how: the implementation: ``kernel`` or ``simulator``.
        device: of the inputs.
        budget: seconds; see :data:`BUDGET_S`.
    """
    start = time.perf_counter()
    tested: list[str] = []
    for op, args in _calls(family, how, device):
        if tested and time.perf_counter() - start > budget:
            break
        tested.append(op.name)
        try:
            failure = _difference(op, how, args)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        if failure:
            return Outcome(family, tuple(tested), time.perf_counter() - start, f"{op.name}: {failure}")
    return Outcome(family, tuple(tested), time.perf_counter() - start)


def _calls(family: str, how: str, device: str) -> Iterator[tuple[Operator, tuple]]:
    """One call of each operator: a decode step of a model on a GPU, a test case (which is smaller) in the simulator."""
    for op in sorted(operators(family), key=lambda op: op.phase == "fine-tuning"):
        if how == dispatch.SIMULATOR:
            points = list(op.cases)
        else:
            points = [{"tokens": min(workload.tokens), **workload.params} for workload in op.workloads]
        for point in points:
            shapes = op.bind(*op.inputs(Maker("meta" if how == dispatch.KERNEL else device), **point))
            plan = op.plan(*shapes)
            if plan.launches and not plan.refusal and (how == dispatch.SIMULATOR or _loadable(plan.launches)):
                yield op, op.bind(*op.inputs(Maker(device), **point))
                break


def _loadable(launches: tuple) -> bool:
    arch = kernels.arch_of(torch.cuda.get_device_capability())
    return settings.jit != "forbid" or not any(kernels.unavailable(launch, arch) for launch in launches)


def _difference(op: Operator, how: str, args: tuple) -> str:
    found = []
    for name in (how, dispatch.REFERENCE):
        own = copy_arguments(args)
        found.append(written(op, own, op.call(name, *own)))
    agreement = compare(op, *found, peer=False)
    return agreement.difference if agreement.kind == DIFFERENT else ""
