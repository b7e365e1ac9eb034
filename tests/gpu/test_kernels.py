"""Ring 3: every kernel on the GPU against its reference on the same device, on small cases and real models' shapes."""

import pytest
from harness import UncoveredError, check
from on_device import needs_device

from tk_serving.operator import operators

MOST_TOKENS = 64

pytestmark = needs_device()

CASES = [pytest.param(op, case, id=f"{op.qualified_name}-{i}") for op in operators() for i, case in enumerate(op.cases)]
SHAPES = [
    pytest.param(op, {"tokens": tokens, **workload.params}, id=f"{op.qualified_name}-{workload.label}-{tokens}")
    for op in operators()
    for workload in op.workloads
    for tokens in workload.tokens
    if tokens <= MOST_TOKENS or tokens == min(workload.tokens)
]


def run(op, params, record_property, **how):
    record_property("operator", op.qualified_name)
    try:
        check(op, "kernel", params, device="cuda", **how)
    except UncoveredError as reason:
        pytest.skip(f"no kernel covers this call: {reason}")
    except AssertionError as difference:
        record_property("difference", str(difference))
        raise


@pytest.mark.parametrize(("op", "params"), CASES + SHAPES)
def test_kernel_equals_reference(op, params, record_property):
    run(op, params, record_property)


@pytest.mark.parametrize(("op", "params"), CASES)
def test_misaligned_inputs(op, params, record_property):
    try:
        run(op, params, record_property, misalign=True, seed=1)
    except ValueError as refusal:
        if "aligned" not in str(refusal):
            raise
        pytest.skip(f"the contract refuses misaligned tensors: {refusal}")
