"""Statistics and the order of the samples."""

import dataclasses

import pytest
import torch

from tk_serving.bench import inputs as bench_inputs
from tk_serving.bench.inputs import Inputs, copy_arguments
from tk_serving.bench.selection import select
from tk_serving.bench.timing import (
    CALLS_BYTES,
    COLD,
    GRAPH,
    MAX_CALLS,
    CudaTimer,
    Footprint,
    HostTimer,
    SampleError,
    abba,
    calls_per_sample,
    measure,
    sets_of,
    summarise,
)


def test_quantiles_interpolate():
    found = summarise([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.median, found.samples) == (3.0, 5)
    assert found.p10 == pytest.approx(1.4)
    assert found.p90 == pytest.approx(4.6)
    assert summarise([7.0]).p90 == 7.0


def test_order_is_abba():
    assert "".join(abba("ABC", 4)) == "ABCCBAABCCBA"


def test_a_drift_of_the_clock_hits_all_alike(fake_timer):
    clock = iter(range(1000))

    class Drifting:
        method = GRAPH

        def sample(self):
            return float(next(clock))

        def release(self):
            pass

    found = measure({"a": Drifting(), "b": Drifting()}, 8)
    assert found["a"].median == found["b"].median
    assert found["a"].samples == 8


def test_the_first_round_is_thrown_away(fake_timer):
    timer = fake_timer([100.0, 2.0, 2.0])
    sampler = timer.prepare(lambda index: lambda: None, GRAPH)
    assert measure({"a": sampler}, 2)["a"].p90 == 2.0
    assert sampler.taken == 3


def test_a_failing_sample_names_its_implementation():
    class Broken:
        method = GRAPH

        def sample(self):
            raise RuntimeError("illegal address")

        def release(self):
            pass

    with pytest.raises(SampleError, match="RuntimeError: illegal address") as caught:
        measure({"peer": Broken()}, 2)
    assert caught.value.name == "peer"


@pytest.mark.parametrize(
    ("single", "mode", "count"), [(1.0, GRAPH, MAX_CALLS), (100.0, GRAPH, 10), (5000.0, GRAPH, 1), (2.0, COLD, 1)]
)
def test_calls_per_sample(single, mode, count):
    assert calls_per_sample(single, mode) == count


def test_host_timer_takes_time():
    sampler = HostTimer().prepare(lambda index: lambda: sum(range(1000)), GRAPH)
    assert sampler.sample() > 0
    assert sampler.method == "stream"


def test_copies_keep_layout_and_sharing():
    buffer = torch.randn(6, 40)
    k, v = buffer[:, :32], buffer[:, 32:]
    column = torch.randn(4, 8).t()
    (k2, v2), column2, flag = copy_arguments(((k, v), column, True))
    for old, new in ((k, k2), (v, v2), (column, column2)):
        assert torch.equal(old, new)
        assert (old.stride(), old.storage_offset()) == (new.stride(), new.storage_offset())
        assert old.data_ptr() != new.data_ptr()
    assert k2.untyped_storage().data_ptr() == v2.untyped_storage().data_ptr()
    assert flag is True
    assert copy_arguments((torch.empty(0, 8),))[0].shape == (0, 8)


MB = 2**20
L2 = 50 * MB


@pytest.mark.parametrize(
    ("count", "moved", "inputs", "results", "sets"),
    [
        (100, 10_000, 10_000, 10_000, 100),  # small: every call has its own
        (9, 400 * MB, 60 * MB, 350 * MB, 9),
        (3, 1800 * MB, CALLS_BYTES * 2, 30 * MB, 1),  # more than the cache twice over, and too large to copy
        (50, 30 * MB, CALLS_BYTES * 2, MB, 4),  # few of many experts: as many sets as outlast the cache
        (100, 7 * MB, 7 * MB, 700 * MB, 15),  # few live rows of many
        (100, 60 * MB, 60 * MB, 60 * MB, CALLS_BYTES // (120 * MB)),
    ],
)
def test_large_inputs_are_copied_no_more_often_than_the_cache_needs(count, moved, inputs, results, sets):
    assert sets_of(count, Footprint(moved, inputs), results, L2) == sets
    assert sets == count or sets * moved >= 2 * L2
    assert sets_of(count, None, results, L2) == count


def test_calls_take_turns_with_the_sets_of_inputs(monkeypatch):
    timer = object.__new__(CudaTimer)
    timer.device = torch.device("cpu")
    free = 50
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    made = timer._calls(lambda index: f"call {index}", "call 0", 7, 3)
    assert made == [f"call {index % 3}" for index in range(7)]
    free = 10  # a device that is nearly full: fewer calls, still none twice
    assert timer._calls(lambda index: index, 0, 20, 20) == list(range(8))


def test_comparisons_share_what_is_large_and_only_read(monkeypatch):
    task = select(["grouped_gemm_fp8_fp4"], ["v4-flash"], [1])[0]
    (case,) = [case for case in task.op.cases if case.get("preallocated")]
    params = {name: value for name, value in case.items() if name != "tokens"}
    small = dataclasses.replace(task, workload=dataclasses.replace(task.workload, params=params), tokens=case["tokens"])
    addresses = lambda args: {name: value.data_ptr() for name, value in named(args).items()}  # noqa: E731
    found = Inputs(small, "cpu")

    def named(args):
        values = found.by_name(args)
        return {"x": values["x"][0], "weight": values["weight"][0], "out": values["out"]}

    largest = named(found[0])["weight"].numel()
    assert addresses(found.fresh())["weight"] != addresses(found[0])["weight"]
    monkeypatch.setattr(bench_inputs, "LARGE", largest - 1)
    found = Inputs(small, "cpu")
    first, compared, second = (addresses(args) for args in (found[0], found.fresh(), found[1]))
    assert first["weight"] == compared["weight"] != second["weight"]
    assert len({one["x"] for one in (first, compared, second)}) == 3
    assert len({one["out"] for one in (first, compared, second)}) == 3
    assert found.num_bytes > largest

    monkeypatch.setattr(bench_inputs, "LARGE", 0)
    found = Inputs(small, "cpu")
    assert addresses(found[0])["x"] == addresses(found.fresh())["x"]
    assert addresses(found[0])["out"] != addresses(found.fresh())["out"]  # is written
