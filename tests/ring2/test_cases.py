"""Ring 2: the generated CUDA of every operator, run on the CPU, against its reference."""

import zlib

import pytest
from harness import UncoveredError, check

from tk_serving import simulator
from tk_serving.operator import operators

CASES = [pytest.param(op, case, id=f"{op.qualified_name}-{i}") for op in operators() for i, case in enumerate(op.cases)]


@pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "misaligned"])
@pytest.mark.parametrize(("op", "case"), CASES)
def test_simulated_kernel_equals_reference(op, case, misaligned):
    """In a random order of threads and blocks, which a failure's test name reproduces."""
    seed = zlib.crc32(f"{op.name} {case} {misaligned}".encode())
    try:
        with simulator.options(fiber_seed=seed):
            check(op, "simulator", case, misalign=misaligned, seed=seed % 1000 if misaligned else 0)
    except UncoveredError as reason:
        pytest.skip(f"no kernel covers this call: {reason}")
    except ValueError as refusal:
        if not misaligned or "aligned" not in str(refusal):
            raise
        pytest.skip(f"the contract refuses misaligned tensors: {refusal}")
