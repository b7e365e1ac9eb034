"""Statistics and the order of the samples."""

import pytest
import torch

from tk_serving.bench.inputs import copy_arguments
from tk_serving.bench.timing import (
    COLD,
    GRAPH,
    MAX_CALLS,
    HostTimer,
    SampleError,
    abba,
    calls_per_sample,
    measure,
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
