"""Ring 2: every kernel compiles for every architecture, with the atomics that were written and without local memory."""

import pytest

from compiling import case_launches, local_memory_reason, measure, nvcc, production_launches
from tk_serving.compile.targets import ARCHS
from tk_serving.operator import operators

OPERATORS = [pytest.param(op, id=op.qualified_name) for op in operators()]
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(nvcc() is None, reason="nvcc not found: put a CUDA toolkit on PATH or set CUDA_HOME"),
]


def launches_of(op, arch):
    """On sm_90a all shapes of the real models; elsewhere the small cases and one production shape of each kernel."""
    production = production_launches(op)
    if arch != "sm_90a":
        production = list({launch.kernel: launch for launch in reversed(production)}.values())
    return list(dict.fromkeys((*case_launches(op), *production)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPERATORS)
def test_compiles(op, arch):
    measured = measure(launches_of(op, arch), arch)
    # TileLang 0.1.12 repeats an atomic where its returned value is used twice.
    repeated = {name: (m["written"], m["generated"]) for name, m in measured.items() if m["generated"] > m["written"]}
    assert not repeated, f"atomics (written, generated): {repeated}"


@pytest.mark.parametrize("op", OPERATORS)
def test_production_shapes_use_no_local_memory(op):
    launches = [launch for launch in production_launches(op) if not local_memory_reason(launch)]
    measured = measure(launches_of(op, "sm_90a"), "sm_90a")
    spilled = {str(launch): measured[str(launch)] for launch in launches if _local(measured[str(launch)])}
    assert not spilled, f"ptxas reports local memory: {spilled}; avoid it, or say why in LOCAL_MEMORY of the kernel's module"


def _local(measured):
    return measured["stack"] or measured["spill"]
