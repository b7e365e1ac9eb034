"""Ring 2: every kernel compiles for every architecture, with the atomics that were written, without local memory, and
waits for the launches before it first of all."""

import pytest
import tilelang
import tilelang.language as T  # noqa: N812  the custom of TileLang
from compiling import (
    before_wait,
    case_launches,
    count_atomics,
    local_memory_reason,
    measure,
    misplaced_triggers,
    production_launches,
)

from tk_serving.compile.targets import ARCHS
from tk_serving.environment import nvcc
from tk_serving.operator import operators
from tk_serving.simulator import source


@pytest.mark.compile
@pytest.mark.skipif(not nvcc(), reason="nvcc not found: put a CUDA toolkit on PATH or set CUDA_HOME")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", operators(), ids=lambda op: op.qualified_name)
def test_compiles(op, arch):
    """All shapes of the real models for sm_90a, one of each kernel elsewhere, and the small cases."""
    production = production_launches(op)
    if arch != "sm_90a":
        production = list({launch.kernel: launch for launch in reversed(production)}.values())
    launches = [launch for launch in dict.fromkeys((*case_launches(op), *production)) if arch in launch.archs]
    if not launches:
        pytest.skip(f"no kernel of {op.name} is for {arch}")
    measured = measure(launches, arch)
    early = {name: found["before_wait"] for name, found in measured.items() if found["before_wait"]}
    assert not early, f"a kernel works before the launches before it have ended: {early}"
    triggers = {name: found["triggers"] for name, found in measured.items() if found["triggers"]}
    assert not triggers, f"a kernel lets the next one begin elsewhere than its launch says: {triggers}"
    # TileLang 0.1.12 repeats an atomic where its returned value is used twice.
    repeated = {name: found for name, found in measured.items() if found["generated"] > found["written"]}
    assert not repeated, f"more atomics in the CUDA than written: {repeated}"
    local = {str(one): measured[str(one)] for one in production if arch in one.archs and not local_memory_reason(one)}
    local = {name: found for name, found in local.items() if found["stack"] or found["spill"]}
    assert not local, (
        f"ptxas reports local memory: {local}; avoid it, or say why in LOCAL_MEMORY of the kernel's module"
    )


@pytest.mark.parametrize("stored", [True, False])
def test_repeated_atomic_is_counted(stored):
    """What the check is for: TileLang 0.1.12 evaluates a returned value at each use, unless it is stored first."""

    rows = T.dynamic("rows")

    @T.prim_func
    def positions(ids: T.Tensor((rows,), "int32"), counts: T.Tensor((8,), "int32"), out: T.Tensor((2, rows), "int32")):
        with T.Kernel(T.ceildiv(rows, 32), threads=32) as block:
            row = block * 32 + T.get_thread_binding()
            if row < rows:
                if stored:
                    kept = T.alloc_local((1,), "int32")
                    kept[0] = T.atomic_add(counts[ids[row]], 1, return_prev=True)
                    out[0, row] = kept[0]
                    out[1, row] = kept[0] * 2
                else:
                    old = T.atomic_add(counts[ids[row]], 1, return_prev=True)
                    out[0, row] = old
                    out[1, row] = old * 2

    generated = source.generate(positions).cuda
    repeats = not stored and tilelang.__version__ == "0.1.12"
    assert (count_atomics(positions.script()), count_atomics(generated)) == (1, 2 if repeats else 1)


WAIT, TRIGGER = "cudaGridDependencySynchronize();", "cudaTriggerProgrammaticLaunchCompletion();"
KERNEL = 'extern "C" __global__ void k(float* x) {\n  float one[1];\n  %s\n  x[0] = one[0];\n%s}\n'


def test_an_access_before_the_wait_is_found():
    assert before_wait(KERNEL % (WAIT, "")) == []
    assert before_wait(KERNEL % (f"one[0] = x[1];\n  {WAIT}", "")) == ["one[0] = x[1];"]
    assert before_wait(KERNEL % ("", "")) == ["x[0] = one[0];", "}"]


def test_a_trigger_elsewhere_than_the_launch_says_is_found():
    at_once, at_end = KERNEL % (f"{WAIT}\n  {TRIGGER}", ""), KERNEL % (WAIT, f"  {TRIGGER}\n")
    assert misplaced_triggers(at_once, last=False) == misplaced_triggers(at_end, last=True) == []
    assert misplaced_triggers(at_end, last=False) == misplaced_triggers(at_once, last=True) == ["x[0] = one[0];"]
    assert misplaced_triggers(KERNEL % (f"{WAIT}\n  {TRIGGER}", f"  {TRIGGER}\n"), last=True) == ["2 triggers"]
    assert misplaced_triggers(KERNEL % (WAIT, ""), last=True) == ["0 triggers", "x[0] = one[0];"]
