"""A whole row: agreement first, then times; what is absent, fails or differs stays visible."""

import contextlib
import sys
import types

import pytest
import torch

from tk_serving.bench import peers
from tk_serving.bench.agreement import CLOSE, DIFFERENT, EQUAL, compare, written
from tk_serving.bench.implementations import Bench, DeviceLostError
from tk_serving.bench.peers import PeerCall, PeerUnavailableError
from tk_serving.bench.selection import Task, select
from tk_serving.bench.suite import Suite
from tk_serving.bench.timing import GRAPH, HostTimer
from tk_serving.bench.worker import Remote
from tk_serving.operator import find, operators
from tk_serving.workloads import Maker, Workload


@pytest.fixture
def task():
    return select(["topk_gate"], ["v3"], [8])[0]


@pytest.fixture
def engine(monkeypatch):
    """An engine file that exists for one test; its functions are set by the test."""
    module = types.ModuleType("tk_serving.bench.peers.pretender")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers, "engines", lambda: ["pretender", "torch_ops", "vllm"])
    monkeypatch.setattr("tk_serving.bench.suite.engines", peers.engines)
    return module


def suite_of(timer, *wanted, **options):
    return Suite(Bench(timer, "cpu"), copy_gbps=4000.0, wanted=wanted, rounds=4, **options)


def with_peers(monkeypatch, task, *names):
    monkeypatch.setitem(task.op.__dict__, "peers", names)
    return task


def test_times_bandwidth_and_ratio(fake_timer, task):
    timer = fake_timer([2.0, 1.9, 2.1], 5.0, 3.0)
    row = suite_of(timer, "reference", "torch_ops").measure(task, GRAPH)
    assert (row.operator, row.workload, row.tokens, row.model) == ("moe.topk_gate", "deepseek-v3-decode", 8, "v3")
    assert row.us == pytest.approx(2.0, rel=0.06)
    assert row.bytes == 8 * 256 * 4 + 8 * 8 * 8
    assert row.gbps == pytest.approx(row.bytes / (row.us * 1e3))
    assert row.pct_copy == pytest.approx(100 * row.gbps / 4000)
    assert [peer.name for peer in row.peers] == ["torch_ops", "reference"]
    assert (row.peer, row.peer_us) == ("reference", 3.0)
    assert row.ratio == pytest.approx(3.0 / row.us)
    assert row.equal is True
    assert [peer.agreement for peer in row.peers] == [EQUAL, EQUAL]
    assert all(sampler.released for sampler in timer.samplers)


def test_without_peers_there_is_no_ratio(fake_timer, task):
    row = suite_of(fake_timer(2.0), "none").measure(task, GRAPH)
    assert (row.peer, row.peer_us, row.ratio) == (None, None, None)
    assert row.us == 2.0


def test_absent_peers_are_named_with_the_reason(fake_timer, task, monkeypatch):
    with_peers(monkeypatch, task, "vllm", "torch_ops:absent_function", "nowhere")
    row = suite_of(fake_timer(2.0), "vllm", "torch_ops", "nowhere").measure(task, GRAPH)
    reasons = {peer.name: peer.absent for peer in row.peers}
    assert reasons["vllm"] == "vllm has no topk_gate"
    assert reasons["torch_ops:absent_function"] == "torch_ops has no absent_function"
    assert reasons["nowhere"].startswith("nowhere is none of the peers")
    assert row.ratio is None


def test_a_wrong_peer_is_shown_and_still_timed(fake_timer, task, monkeypatch, engine):
    engine.topk_gate = lambda scores, num_topk: lambda: torch.zeros(scores.shape[0], num_topk, dtype=torch.int64)
    with_peers(monkeypatch, task, "pretender")
    row = suite_of(fake_timer(2.0, 1.0), "pretender").measure(task, GRAPH)
    assert row.peers[0].agreement == DIFFERENT
    assert "elements differ, first at [0, 0]" in row.peers[0].difference
    assert row.equal is False
    assert row.ratio == 0.5


def test_a_peer_without_comparable_results_says_so(fake_timer, task, monkeypatch, engine):
    engine.topk_gate = lambda scores, num_topk: PeerCall(lambda: None, None, "delivers packed words")
    with_peers(monkeypatch, task, "pretender")
    peer = suite_of(fake_timer(2.0), "pretender").measure(task, GRAPH).peers[0]
    assert (peer.agreement, peer.difference) == (None, "not compared: delivers packed words")


def test_a_failing_peer_is_absent(fake_timer, task, monkeypatch, engine):
    def broken(scores, num_topk):
        return lambda: 1 / 0

    engine.topk_gate = broken
    with_peers(monkeypatch, task, "pretender")
    row = suite_of(fake_timer(2.0), "pretender").measure(task, GRAPH)
    assert row.peers[0].absent == "fails with ZeroDivisionError: division by zero"
    assert row.us == 2.0


def test_a_peer_that_fails_while_timed_is_left_out(task, monkeypatch, engine, fake_timer):
    calls = []

    def later(scores, num_topk):
        def run():
            calls.append(1)
            if len(calls) > 4:
                raise RuntimeError("out of luck")
            return scores.topk(num_topk).indices

        return run

    engine.topk_gate = later
    with_peers(monkeypatch, task, "pretender")
    row = suite_of(fake_timer(2.0), "pretender").measure(task, GRAPH)
    assert "fails while it is timed: RuntimeError: out of luck" in row.peers[0].absent
    assert row.us == 2.0


def test_our_own_failure_is_an_error_of_the_row(fake_timer, task, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(task.op.__dict__, "public", broken)
    row = suite_of(fake_timer(3.0), "reference").measure(task, GRAPH)
    assert row.error == "fails with RuntimeError: no such kernel"
    assert (row.us, row.ratio) == (None, None)
    assert row.peer_us == 3.0


def test_a_row_without_memory_says_who_has_it(fake_timer, task, monkeypatch):
    full = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 8.37 GiB. GPU 0 has a total capacity of 140 GiB"
    )

    def fails(*_, **__):
        raise full

    timer = fake_timer(2.0)
    timer.prepare = fails
    assert suite_of(timer, "reference").measure(task, GRAPH).error == "no memory"
    monkeypatch.setitem(task.op.__dict__, "inputs", fails)
    assert suite_of(fake_timer(2.0)).measure(task, GRAPH).error == "no memory"

    bench = Bench(fake_timer(2.0), "cpu")
    bench.device = "cuda"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30 << 30)
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    assert bench.no_memory(full) == (
        "no memory: 2.0 GiB of 140.0 are free, this process has 30.0, others and the driver 108.0; "
        "the row asked for 8.37 GiB more"
    )
    assert freed


def test_a_lost_device_ends_the_run(task, monkeypatch):
    bench = Bench(HostTimer(), "cpu")
    bench.device = "cuda"
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (_ for _ in ()).throw(RuntimeError("unspecified failure")))
    with pytest.raises(DeviceLostError, match=r"boom; the device no longer answers: unspecified failure"):
        bench.survive(RuntimeError("boom"))


def test_inputs_of_a_row_are_made_once(fake_timer, task):
    bench = Bench(fake_timer(1.0), "cpu")
    first = bench.start(task)
    assert bench.start(task) is first
    assert first.inputs[1][0].data_ptr() != first.inputs[0][0].data_ptr()
    bench.finish()
    assert bench.start(task) is not first


def test_modes_and_rows_in_order(fake_timer, task):
    timer, rows = fake_timer(1.0), []
    suite_of(timer, "none").run([task], ["graph", "cold"], rows.append)
    assert [row.mode for row in rows] == ["graph", "cold"] == timer.modes


class TestAgreement:
    def rules(self, actual, expected, peer):
        return compare(find("topk_gate"), actual, expected, peer=peer).kind

    def test_codes_one_step_apart_are_close_for_a_peer_only(self):
        expected = torch.linspace(-4, 4, 1000).to(torch.float8_e4m3fn)
        actual = expected.clone()
        actual.view(torch.uint8)[17] ^= 1
        assert self.rules([actual], [expected], peer=True) == CLOSE
        assert self.rules([actual], [expected], peer=False) == DIFFERENT

    def test_rounding_of_floats_is_close(self):
        expected = torch.randn(100)
        assert self.rules([expected * 1.001], [expected], peer=True) == CLOSE
        assert self.rules([expected * 1.5], [expected], peer=True) == DIFFERENT

    def test_integers_must_be_equal(self):
        expected = torch.arange(10)
        assert self.rules([expected + 1], [expected], peer=True) == DIFFERENT

    def test_a_peer_may_use_other_strides_and_leave_results_out(self):
        expected = torch.randn(8, 4)
        other = expected.t().contiguous().t()
        assert self.rules([other, None], [expected, expected], peer=True) == EQUAL
        assert self.rules([other], [expected], peer=False) == DIFFERENT

    def test_shapes_and_dtypes_count(self):
        expected = torch.randn(8, 4)
        assert self.rules([expected[:4]], [expected], peer=True) == DIFFERENT
        assert self.rules([expected.double()], [expected], peer=True) == DIFFERENT
        assert self.rules([], [expected], peer=True) == DIFFERENT


def test_absent_written_arguments_keep_the_places_of_the_rules():
    op = find("moe_topk_gate")
    args = op.bind(*op.inputs(Maker("cpu"), tokens=2, experts=8, topk=2, with_scores=True))
    found = written(op, args, op.public(*args[:18]))
    assert [None if part is None else tuple(part.shape) for part in found] == [(2, 2), (2, 2), None, None, None, (2, 8)]


class TestOtherProcess:
    def test_times_and_agreement_come_back(self, task):
        remote = Remote(device="cpu")
        try:
            ready = remote.prepare("torch_ops", task, GRAPH)
            assert ready.agreement.kind == EQUAL
            assert ready.note == "any order among equal scores"
            assert ready.sampler.sample() > 0
            ready.sampler.release()
            remote.finish()
            assert remote.versions["torch"]
            with pytest.raises(PeerUnavailableError, match="vllm has no topk_gate"):
                remote.prepare("vllm", task, GRAPH)
        finally:
            remote.close()

    def test_the_site_comes_first_on_the_path(self, tmp_path):
        (tmp_path / "vllm.py").write_text("raise RuntimeError('a broken site')")
        remote = Remote(str(tmp_path), device="cpu")
        try:
            with pytest.raises(PeerUnavailableError, match="does not import: RuntimeError: a broken site"):
                remote.prepare("vllm", select(["per_token_cast"], ["v3"], [4])[0], GRAPH)
        finally:
            remote.close()

    def test_a_dead_process_is_a_reason(self, task):
        remote = Remote(device="cpu")
        remote.prepare("torch_ops", task, GRAPH)
        remote.close()
        with pytest.raises(PeerUnavailableError, match="its process ended"):
            remote.prepare("torch_ops", task, GRAPH)
        with pytest.raises(PeerUnavailableError, match="its process ended"):  # nor for the rest of the row
            remote.prepare("torch_ops", task, GRAPH)
        remote.finish()
        assert remote.prepare("torch_ops", task, GRAPH).agreement.kind == EQUAL
        remote.close()

    def test_tile_kernels_never_shares_our_process(self, fake_timer):
        suite = suite_of(fake_timer(1.0))
        assert isinstance(suite.preparer("tile_kernels"), Remote)
        assert suite.preparer("vllm") is suite.bench
        assert isinstance(suite_of(fake_timer(1.0), sites={"vllm": "/x"}).preparer("vllm"), Remote)


@pytest.mark.parametrize("op", operators(), ids=lambda op: op.qualified_name)
def test_every_operator_can_be_measured(op):
    """A rehearsal on the CPU, where ours is the reference: inputs, results and written arguments fit together."""
    case = dict(next(case for case in op.cases if case["tokens"] > 0))
    tokens = case.pop("tokens")
    row = suite_of(HostTimer(), "reference").measure(Task(op, Workload("case", case, (tokens,)), tokens), GRAPH)
    assert row.error == ""
    assert row.difference == row.peers[0].difference == ""
    assert (row.agreement, row.peers[0].agreement) == (EQUAL, EQUAL)
    assert row.ratio > 0
    for workload in op.workloads[:1]:
        made = op.inputs(Maker("meta"), tokens=workload.tokens[0], **workload.params)
        assert op.compulsory_bytes(*op.bind(*made)) > 0


@pytest.mark.parametrize("op", [op for op in operators() if "torch_ops" in op.peers], ids=lambda op: op.name)
def test_operators_of_torch_agree(op):
    for workload in op.workloads[:1]:
        peer = suite_of(HostTimer(), "torch_ops").measure(Task(op, workload, 8), GRAPH).peers[0]
        assert (peer.absent, peer.difference) == ("", "")
        assert peer.agreement == EQUAL


def test_every_declared_peer_exists():
    """A name in a contract that leads nowhere would be reported as absent for ever."""
    for task in {task.op.name: task for task in select()}.values():
        for peer in task.op.peers:
            engine, _, function = peer.partition(":")
            assert engine in peers.engines(), f"{task.op.name}: {peer}"
            assert callable(getattr(peers.engine_module(engine), function or task.op.name, None)), (
                f"{task.op.name}: {peer}"
            )


def test_peer_functions_take_the_public_arguments(monkeypatch):
    """Called with the real arguments, a peer is absent because its engine is, not because of a wrong signature."""
    monkeypatch.setattr(peers, "_import", lambda module: f"{module} is hidden by this test")
    for op in {task.op.name: task.op for task in select()}.values():
        if not op.peers:
            continue
        inputs = Bench(HostTimer(), "cpu").start(Task(op, op.workloads[0], 4)).inputs
        for peer in op.peers:
            with contextlib.suppress(PeerUnavailableError):
                peers.prepare(peer, op.name, inputs.by_name(inputs[0]))
