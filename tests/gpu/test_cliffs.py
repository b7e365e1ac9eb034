"""Times grow with the work: public reports of sizes that were slower than larger ones (regressions P01, P02)."""

import itertools

import pytest
from on_device import needs_device

from tk_serving.bench.implementations import Bench
from tk_serving.bench.selection import Task, select
from tk_serving.bench.suite import Suite
from tk_serving.bench.timing import GRAPH, CudaTimer
from tk_serving.operator import find
from tk_serving.workloads import Workload

gpu, capable = needs_device()

SLACK = 1.3
MODELS = {
    "per_token_cast": "v3",
    "cast_back": "v3",
    "swiglu_forward_and_per_token_cast": "v4-flash",
    "norm_forward_and_per_token_cast": "v3",
    "moe_topk_gate": "v4-flash",
    "expand_to_fused_with_sf": "v3",
    "reduce_fused": "v3",
    "mhc_post_pre_fused": "v4-flash",
    "mhc_head_fused": "v4-flash",
}
TOKENS = (1, 8, 32, 40, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@pytest.fixture(scope="module")
def microseconds():
    """The time of one call of ours, checked against the reference first."""
    suite = Suite(Bench(CudaTimer()), copy_gbps=1.0, wanted=("none",), rounds=6)

    def time(task):
        row = suite.measure(task, GRAPH)
        assert (row.error, row.agreement) == ("", "equal")
        return row.us

    return time


@gpu
@capable
def test_p01_swiglu_and_cast_of_fewer_and_shorter_rows(microseconds):
    op = find("swiglu_forward_and_per_token_cast")

    def time(tokens, hidden):
        return microseconds(Task(op, Workload("p01", {"hidden": hidden, "npc": 128}, (tokens,)), tokens))

    assert time(128, 1024) <= SLACK * time(256, 2048)


@gpu
@capable
@pytest.mark.parametrize("operator", MODELS)
def test_p02_no_token_count_is_slower_than_a_larger_one(microseconds, operator):
    tasks = of_one_form(operator)
    times = {tokens: microseconds(task) for tokens, task in tasks.items()}
    for tokens in {a for a, _ in cliffs(times)}:  # once more: another process on the device is no cliff
        times[tokens] = min(times[tokens], microseconds(tasks[tokens]))
    assert not cliffs(times), f"slower than a larger count: {cliffs(times)}; {times}"


def of_one_form(operator):
    """Tasks of the workload form that comes first, by token count: other parameters are other work."""
    first, *others = select([operator], [MODELS[operator]], TOKENS)
    return {task.tokens: task for task in (first, *others) if task.params == first.params}


def cliffs(times):
    """Pairs of token counts of which the smaller takes longer."""
    return [(a, b) for a, b in itertools.combinations(sorted(times), 2) if times[a] > SLACK * times[b]]


def test_a_cliff_is_seen():
    assert cliffs({1: 2.0, 64: 9.0, 128: 6.5, 256: 9.1}) == [(64, 128)]


@pytest.mark.parametrize("operator", MODELS)
def test_times_of_one_form_alone_are_compared(operator):
    tasks = of_one_form(operator)
    assert list(tasks) == list(TOKENS)
    assert len({repr(task.params) for task in tasks.values()}) == 1
