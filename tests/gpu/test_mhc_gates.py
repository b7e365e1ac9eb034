"""What mHC kernels may cost at most; by replay of a CUDA graph."""

import pytest
from on_device import needs_device

from tk_serving import dispatch
from tk_serving.bench.timing import GRAPH, CudaTimer, measure
from tk_serving.operator import find
from tk_serving.workloads import Maker

pytestmark = needs_device()


@pytest.mark.parametrize("name", ["mhc_pre_big_fuse", "mhc_post_pre_fused", "mhc_head_fused"])
def test_p02_no_step_in_time_behind_32_tokens(name):
    """40 tokens take at most 1.3 times as long as 32."""
    op, timer = find(name), CudaTimer("cuda")

    def calls(tokens):
        def call(index):
            args = op.inputs(Maker("cuda", seed=index), tokens=tokens, hidden=4096)
            args = dispatch.args_by_kind(op, op.bind(*args))
            return lambda: op.public(*args[0], **args[1])

        return call

    samplers = {tokens: timer.prepare(calls(tokens), GRAPH) for tokens in (32, 40)}
    times = measure(samplers, 8)
    assert times[40].median <= 1.3 * times[32].median, times
