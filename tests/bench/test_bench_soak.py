"""What the soak concludes from what it saw, without a server."""

import copy
import json
import os

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from tk_serving import metrics
from tk_serving.bench.e2e import soak


def counters(steps):
    return {
        "requests": {"length": 9, "abort": 1},
        "calls": {"mhc_post kernel": 3 * steps, "gate engine stays by table": steps, "gate kernel": steps},
        "compilations": 0,
    }


def good():
    samples = [
        {
            "s": 5.0 * i,
            "device_mib": 14000.0,
            "host_mib": 5000 + i % 2,
            "calls": soak.by_operator(counters(100 + 200 * i)),
        }
        for i in range(12)
    ]
    return {
        "samples": samples,
        "alive": True,
        "errors": [],
        "errors_in_log": [],
        "sent": {"sent": 11, "finished": 9, "hung_up": 2},
        "counters": counters(2300),
    }


def without(record, check):
    assert not soak.judge(record)
    assert [name for name, ok in record["checks"].items() if not ok] == [check]


@pytest.mark.parametrize(
    ("workers", "good_so"),
    [
        ([{"active": True, "mode": "error"}], True),
        ([{"active": True, "mode": "error"}, {"active": True, "mode": "warn"}], False),
        ([{"active": False, "mode": "error"}], False),
        ([], False),
    ],
)
def test_after_a_warm_up_the_monitor_of_every_worker_has_to_be_on_error(workers, good_so):
    record = {**good(), "warm_up": {"jit_monitor": workers}}
    assert soak.judge(record) == record["checks"]["jit_monitor"] == good_so


def test_a_good_soak_passes():
    record = good()
    assert soak.judge(record)
    assert all(record["checks"].values())
    assert record["growth"] == {"device_mib": 0.0, "host_mib": 0.0}


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("alive", {"alive": False}),
        ("alive", {"failed": "RuntimeError"}),
        ("no_error", {"errors": ["500: no"]}),
        ("no_error", {"errors_in_log": ["ERROR"]}),
        ("all_ended", {"sent": {"sent": 12, "finished": 9, "hung_up": 2}}),
        ("requests_add_up", {"counters": {**counters(2300), "requests": {"length": 8}}}),
        ("requests_add_up", {"counters": {**counters(2300), "requests": {"length": 12}}}),
        ("no_call_without_kernel", {"counters": {**counters(1), "calls": {"gate reference not built": 1}}}),
        ("no_compilation", {"counters": {**counters(2300), "compilations": 1}}),
    ],
)
def test_every_fault_is_named(check, change):
    without({**good(), **change}, check)


@pytest.mark.parametrize(
    ("check", "key", "more"), [("device_steady", "device_mib", 30), ("host_steady", "host_mib", 40)]
)
def test_memory_that_grows(check, key, more):
    record = good()
    for i, sample in enumerate(record["samples"]):
        sample[key] += more * i
    without(record, check)


def test_calls_that_do_not_add_up():
    """In the second half a step calls the gate less often."""
    record = good()
    for sample in record["samples"][7:]:
        sample["calls"]["gate"] = record["samples"][6]["calls"]["gate"]
    without(record, "calls_add_up")


def test_a_rare_operator_and_a_step_under_way_prove_nothing():
    samples = copy.deepcopy(good()["samples"])
    for sample in samples:
        sample["calls"]["rare"] = soak.FEW_CALLS - 1 if sample is samples[0] else soak.FEW_CALLS
    samples[-1]["calls"]["mhc_post"] -= 2
    assert soak.add_up(samples)
    assert not soak.add_up(samples[:2])
    assert not soak.add_up([{"calls": {}}] * 4)


def test_counters_are_read_off_the_page_that_the_server_shows(tmp_path):
    state = {
        "counters": [{"operator": "mhc_post", "implementation": "kernel", "reason": "", "calls": 5}],
        "compilations": [{"kernel": "mhc.post", "compilations": 2, "seconds": 9.5}],
        "sites": [],
    }
    (tmp_path / f"tk-serving-{os.getpid()}.json").write_text(json.dumps({"pid": os.getpid(), "process": "", **state}))
    registry = CollectorRegistry()
    registry.register(metrics.Collector(str(tmp_path)))
    ended = Counter(
        "vllm:request_success", "Requests by how they ended", ["finished_reason", "engine"], registry=registry
    )
    ended.labels("length", "0").inc(7)
    found = soak.read(generate_latest(registry).decode())
    assert found == {"requests": {"length": 7}, "calls": {"mhc_post kernel": 5}, "compilations": 2}


def test_time_in_which_the_process_was_stopped_does_not_count():
    clock = soak._Clock(limit=2.0)
    for passed in (0.25, 0.5, 80.0, 0.25):
        clock.add(passed)
    assert (clock.seconds, clock.stopped, clock.ended) == (1.0, 80.0, False)
    clock.add(1.5)
    assert clock.ended
