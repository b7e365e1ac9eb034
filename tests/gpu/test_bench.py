"""The timer on a real device, and one benchmark from the command line."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tk_serving.bench.implementations import Bench
from tk_serving.bench.selection import select
from tk_serving.bench.suite import Suite
from tk_serving.bench.timing import CALLS_BYTES, COLD, GRAPH, STREAM, CudaTimer, Footprint
from tk_serving.cli import app

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def timer():
    return CudaTimer()


def test_copy_bandwidth_and_floor(timer):
    assert 500 < timer.copy_gbps(4).median < 20_000
    assert 0.3 < timer.floor_us(GRAPH, 8).median < 10
    assert timer.floor_us(COLD, 8).median < 30


def test_time_follows_the_work(timer):
    def copies(count):
        source = torch.randn(2**24, device="cuda")
        targets = [torch.empty_like(source) for _ in range(count)]
        return timer.prepare(lambda _: lambda: [target.copy_(source) for target in targets], GRAPH)

    one, four = copies(1), copies(4)
    assert one.method == GRAPH
    assert 2.5 < four.sample() / one.sample() < 5.5


def test_inputs_come_from_memory_not_from_the_cache(timer):
    # 8 MB fit into the L2: read again and again from there, they would come faster than any memory.
    sources = [torch.randn(2**21, device="cuda") for _ in range(64)]
    outputs = [torch.empty((), device="cuda") for _ in sources]
    sampler = timer.prepare(lambda i: lambda: torch.sum(sources[i % 64], dim=0, out=outputs[i % 64]), COLD)
    peak = timer.copy_gbps(4).median
    assert 2**23 / (sampler.sample() * 1e3) < 1.1 * peak


def test_calls_that_take_turns_read_from_memory(timer):
    # Copies of what would fill the device are as few as outlast the L2.
    size, made = 2**23, {}
    out = torch.empty((), device="cuda")

    def call(index):
        made.setdefault(index, torch.randn(size, device="cuda"))
        return lambda: torch.sum(made[index], dim=0, out=out)

    sampler = timer.prepare(call, GRAPH, Footprint(moved=4 * size, inputs=CALLS_BYTES))
    assert len(made) == -(-2 * timer.l2_bytes // (4 * size))
    assert 4 * size / (sampler.sample() * 1e3) < 1.1 * timer.copy_gbps(4).median


def test_a_call_that_synchronises_is_timed_with_the_host(timer):
    x = torch.randn(1000, device="cuda")
    sampler = timer.prepare(lambda _: lambda: x.sum().item(), GRAPH)
    assert sampler.method == STREAM
    assert sampler.sample() > 1
    assert timer.prepare(lambda _: x.sum, GRAPH).method == GRAPH  # the timer is still usable


def test_ours_agrees_and_is_timed(timer):
    suite = Suite(Bench(timer), timer.copy_gbps(4).median, ("reference", "torch_ops"), rounds=4)
    with torch.no_grad():
        row = suite.measure(select(["topk_gate"], ["v3"], [64])[0], GRAPH)
    assert (row.error, row.agreement, row.method) == ("", "equal", GRAPH)
    assert 0.3 < row.us < 1000
    assert row.p10 <= row.us <= row.p90
    assert row.ratio > 0


def test_one_command(tmp_path):
    json_file, plot_file = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["topk_gate", "--model", "v3", "--tokens", "1,64", "--peers", "torch_ops", "--rounds", "4"]
    done = CliRunner().invoke(app, ["bench", *arguments, "--json", str(json_file), "--plot", str(plot_file)])
    assert done.exit_code == 0, done.output
    record = json.loads(json_file.read_text())
    assert [row["tokens"] for row in record["rows"]] == [1, 64]
    assert record["copy_gbps"] > 500
    assert plot_file.read_bytes().startswith(b"\x89PNG")
