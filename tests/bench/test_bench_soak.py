"""What the soak concludes from what it saw, without a server."""

import asyncio
import copy
import json
import mmap
import os

import psutil
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
            "s": 30.0 * i,
            "idle": i % 2 == 0,
            "allocated_mib": 9000.0 + i % 2 * 300,  # a step is under way
            "device_mib": 14000.0,
            "host_mib": 2500 + 9 / (i + 1),
            "calls": soak.by_operator(counters(100 + 200 * i)),
        }
        for i in range(21)
    ]
    return {
        "samples": samples,
        "alive": True,
        "errors": [],
        "errors_in_log": [],
        "sent": {"sent": 11, "finished": 9, "hung_up": 2},
        "counters": counters(4100),
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
    assert record["memory"]["allocated_mib"] == {
        "from": 9000.0,
        "grown": 0.0,
        "may": 64.0,
        "stretches": 6,
        "rose": 0,
        "may_rise": 3,
    }


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


CHECKS = {"allocated_mib": "device_steady", "device_mib": "device_steady", "host_mib": "host_steady"}


def grown(key, mib):
    """A good soak in which a series has ``mib(minute)`` more."""
    record = good()
    for sample in record["samples"]:
        sample[key] += mib(sample["s"] / 60)
    return record


@pytest.mark.parametrize("key", CHECKS)
@pytest.mark.parametrize(
    "leak",
    [
        lambda minute: 2 * minute,  # in all less than a workspace may take
        lambda minute: 2 * minute - 3 * (minute == 7),
    ],
    ids=["steadily", "with a dip"],
)
def test_a_leak_of_two_mib_a_minute(key, leak):
    without(grown(key, leak), CHECKS[key])


@pytest.mark.parametrize(("key", "leap"), [("allocated_mib", 40), ("device_mib", 300), ("host_mib", 30)])
def test_a_leak_in_leaps(key, leap):
    """In two of the six stretches: no more than a workspace or a late segment each time, but too much in all."""
    without(grown(key, lambda minute: leap * (minute // 3)), CHECKS[key])


@pytest.mark.parametrize("key", CHECKS)
@pytest.mark.parametrize("minute", range(11))
def test_no_leak(key, minute):
    """One late segment of the allocator, as of a first use; what grows until the first third of the load has gone."""
    size = {"allocated_mib": 60, "device_mib": 128, "host_mib": 40}[key]
    assert soak.judge(grown(key, lambda now: size * (now >= minute)))
    assert soak.judge(grown(key, lambda now: 200 * min(now, 3.3) + 0.5 * now))


def test_what_a_step_takes_is_no_growth():
    """Only points at which the server is idle count."""
    record = good()
    for i, sample in enumerate(record["samples"]):
        sample["allocated_mib"] += 50 * i * (not sample["idle"])
    assert soak.judge(record)


def test_without_enough_idle_points_nothing_is_steady():
    record = good()
    record["samples"] = [{**sample, "idle": sample["s"] < 300} for sample in record["samples"]]
    assert not soak.judge(record)
    assert record["memory"] == {"allocated_mib": {}, "device_mib": {}, "host_mib": {}}


def test_a_server_that_cannot_be_asked_is_judged_by_what_it_reserves():
    record = good()
    for sample in record["samples"]:
        del sample["allocated_mib"]
    assert soak.judge(record)
    for sample in record["samples"]:
        sample["device_mib"] += sample["s"]
    without(record, "device_steady")


def test_calls_that_do_not_add_up():
    """In the second half a step calls the gate less often."""
    record = good()
    for sample in record["samples"][11:]:
        sample["calls"]["gate"] = record["samples"][10]["calls"]["gate"]
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


def test_kernels_that_the_jit_monitor_names_are_read_off_the_log():
    warned = (
        "WARNING 12-01 01:47:29 [jit_monitor.py:140] Triton kernel JIT compilation during inference: Gather.kernel. "
    )
    raised = (
        "ERROR RuntimeError: TileLang JIT compilation during inference: mhc_post_tilelang. This causes a latency spike"
    )
    log = "\n".join((warned + "This causes a latency spike", raised, "ERROR other", raised))
    assert soak.compiled(log) == ["Gather.kernel (Triton)", "mhc_post_tilelang (TileLang)"]


def test_time_in_which_the_process_was_stopped_does_not_count():
    clock = soak._Clock(limit=2.0)
    for passed in (0.25, 0.5, 80.0, 0.25):
        clock.add(passed)
    assert (clock.seconds, clock.stopped, clock.ended) == (1.0, 80.0, False)
    clock.resting = True
    clock.add(1.5)
    assert (clock.seconds, clock.rested, clock.ended) == (1.0, 1.5, False)
    clock.resting = False
    clock.add(1.5)
    assert clock.ended


def test_clients_hold_still_while_the_server_is_let_run_empty(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    running, served = 0, 0

    async def one(generator):
        nonlocal running, served
        running += 1
        await asyncio.sleep(0.02)
        running, served = running - 1, served + 1

    async def main():
        load, clock = soak._Load(None, str(tmp_path), 8), soak._Clock(60)
        load._one = one
        clients = [asyncio.create_task(load.client(i, clock)) for i in range(8)]
        await asyncio.sleep(0.05)
        await load.rest()
        assert running == 0 < served
        before = served
        await asyncio.sleep(0.6)  # longer than clients ever wait by themselves
        assert served == before
        clock.end()
        load.go_on()
        await asyncio.wait_for(asyncio.gather(*clients), 5)
        assert not load.errors

    asyncio.run(main())


def test_what_a_process_has_written_is_counted_and_what_it_has_read_is_not(tmp_path):
    process = psutil.Process()
    (file := tmp_path / "file").write_bytes(bytes(64 << 20))
    before = soak._written(process)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert soak._written(process) < before + (32 << 20)
        with mmap.mmap(-1, 64 << 20) as kept:  # a fresh one: the heap may have as much to give away
            for place in range(0, len(kept), 4096):
                kept[place] = 1
            assert soak._written(process) > before + (48 << 20)
