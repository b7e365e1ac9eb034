"""Ring 2: every kernel compiles for every architecture, with the atomics that were written and without local memory."""

import pytest
from compiling import case_launches, local_memory_reason, measure, nvcc, production_launches

from tk_serving.compile.targets import ARCHS
from tk_serving.operator import operators


@pytest.mark.compile
@pytest.mark.skipif(nvcc() is None, reason="nvcc not found: put a CUDA toolkit on PATH or set CUDA_HOME")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", operators(), ids=lambda op: op.qualified_name)
def test_compiles(op, arch):
    """All shapes of the real models for sm_90a, one of each kernel elsewhere, and the small cases."""
    production = production_launches(op)
    if arch != "sm_90a":
        production = list({launch.kernel: launch for launch in reversed(production)}.values())
    measured = measure(list(dict.fromkeys((*case_launches(op), *production))), arch)
    # TileLang 0.1.12 repeats an atomic where its returned value is used twice.
    repeated = {name: found for name, found in measured.items() if found["generated"] > found["written"]}
    assert not repeated, f"more atomics in the CUDA than written: {repeated}"
    local = {str(launch): measured[str(launch)] for launch in production if not local_memory_reason(launch)}
    local = {name: found for name, found in local.items() if found["stack"] or found["spill"]}
    assert not local, (
        f"ptxas reports local memory: {local}; avoid it, or say why in LOCAL_MEMORY of the kernel's module"
    )
