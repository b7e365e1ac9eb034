"""Ring 2: the generated CUDA of every operator, run on the CPU, against its reference."""

import zlib

import pytest

from harness import Uncovered, check
from tk_serving import simulator
from tk_serving.operator import operators

CASES = [pytest.param(op, case, id=f"{op.qualified_name}-{i}") for op in operators() for i, case in enumerate(op.cases)]


def run(op, case, **how):
    try:
        check(op, "simulator", case, **how)
    except Uncovered as reason:
        pytest.skip(f"no kernel covers this call: {reason}")


@pytest.mark.parametrize(("op", "case"), CASES)
def test_simulated_kernel_equals_reference(op, case):
    run(op, case)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_in_random_thread_order_with_misaligned_inputs(op, case):
    seed = zlib.crc32(f"{op.name} {case}".encode())
    with simulator.options(fiber_seed=seed):
        try:
            run(op, case, misalign=True, seed=seed % 1000)
        except ValueError as refusal:
            if "aligned" not in str(refusal):
                raise
            pytest.skip(f"the contract refuses misaligned tensors: {refusal}")
