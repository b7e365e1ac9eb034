"""The record, and everything that is made of it."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from tk_serving.bench import compare as comparing
from tk_serving.bench import report, run
from tk_serving.bench.page import page
from tk_serving.bench.record import Record, complete, geometric_mean, merge
from tk_serving.bench.targets import engine_ratio


def shown(record, width=200):
    console = Console(file=io.StringIO(), width=width)
    report.show(record, console)
    return console.file.getvalue()


class TestRecord:
    FIELDS = ("device", "driver", "versions", "revision", "date", "copy_gbps", "floor_us", "rows")
    ROW = (
        *("operator", "workload", "tokens", "mode", "us", "p10", "p90", "bytes", "gbps", "pct_copy"),
        *("peer", "peer_us", "ratio", "equal"),
    )

    def test_format(self, record, tmp_path):
        record().save(tmp_path / "deep" / "record.json")
        found = json.loads((tmp_path / "deep" / "record.json").read_text())
        assert set(self.FIELDS) <= found.keys()
        assert all(set(self.ROW) <= row.keys() for row in found["rows"])
        assert isinstance(found["floor_us"], float)

    def test_round_trip(self, record, tmp_path):
        record().save(tmp_path / "a.json")
        assert Record.load(tmp_path / "a.json") == record()

    def test_another_file_is_refused(self, tmp_path):
        (tmp_path / "a.json").write_text('{"rows": []}')
        with pytest.raises(ValueError, match=r"a.json: expected a record of tk-serving bench"):
            Record.load(tmp_path / "a.json")

    def test_ratio_is_fastest_peer_over_ours(self, row):
        one = row(us=2.0, factors=(("vllm", 2.0), ("sglang", 1.5), ("reference", 40.0)))
        assert (one.peer, one.peer_us, one.ratio) == ("sglang", 3.0, 1.5)
        assert (one.gbps, one.pct_copy) == (one.bytes / 2000, 100 * one.bytes / 2000 / 4000)

    def test_equal_needs_every_comparison(self, row):
        assert row().equal is True
        assert row(agreement="different").equal is False
        one = row()
        one.peers[0].agreement = "different"
        one.conclude(4000.0)
        assert one.equal is False
        assert row(agreement=None, factors=()).equal is None

    def test_operators_that_did_not_run_come_from_an_earlier_record(self, record, row):
        new = record([row("moe.topk_gate", tokens=8, us=5.0)])
        old = record([row("moe.topk_gate", tokens=64, us=7.0), row("transpose.transpose", tokens=8, us=9.0)])
        old.revision, old.date = "0123456789abcdef", "2026-01-02T03:04:05"
        found = complete(new, old)
        assert [(r.operator, r.tokens) for r in found.rows] == [("moe.topk_gate", 8), ("transpose.transpose", 8)]
        assert found.earlier["transpose.transpose"] == "0123456789ab, 2026-01-02"
        assert "(revision 0123456789ab, 2026-01-02): `transpose.transpose`" in page(found, "record.json")

    def test_an_earlier_record_of_another_device_is_refused(self, record):
        old = record()
        old.device = "another"
        with pytest.raises(ValueError, match=r"earlier: device: expected .*, got 'another'"):
            complete(record(), old)

    def test_parts_of_a_suite_merge(self, record, row):
        first = record([row("moe.topk_gate", tokens=8, us=5.0)])
        second = record([row("moe.topk_gate", tokens=8, us=4.0), row("quant.per_token_cast", tokens=8)])
        whole = merge([first, second])
        assert [(r.operator, r.us) for r in whole.rows] == [("moe.topk_gate", 4.0), ("quant.per_token_cast", 4.0)]

    def test_a_part_with_other_peers_adds_them(self, record, row):
        first = record([row("moe.topk_gate", tokens=8, us=4.0, factors=(("vllm", 1.5),))])
        second = record([row("moe.topk_gate", tokens=8, us=5.0, factors=(("tile_kernels", 1.2),))])
        (found,) = merge([first, second]).rows
        assert [(peer.name, peer.us, peer.beside) for peer in found.peers] == [
            ("vllm", 6.0, None),
            ("tile_kernels", 6.0, 5.0),
        ]
        assert (found.us, found.peer, found.peer_us, found.ratio) == (4.0, "tile_kernels", 6.0, 1.2)
        assert engine_ratio(found) == 1.2
        assert "| tile_kernels (ours 5.00) | 6.00 | 1.20 |" in page(record([found]), "record.json")

    def test_parts_refer_to_the_copy_bandwidth_of_the_first(self, record, row):
        second = record([row("quant.per_token_cast", tokens=8, us=4.0)], copy_gbps=4080.0)
        whole = merge([record(), second])
        assert whole.copy_gbps == 4000.0
        assert whole.rows[-1].pct_copy == pytest.approx(100 * whole.rows[-1].gbps / 4000.0)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"copy_gbps": 3000.0}, "merge: copy_gbps: expected about 4000, got 3000"),
            ({"device": "NVIDIA H100"}, "merge: device: expected 'NVIDIA H200', got 'NVIDIA H100'"),
            ({"versions": {"torch": "2.14.1"}}, "merge: torch: expected version 2.11.0, got 2.14.1"),
        ],
    )
    def test_parts_of_different_machines_do_not(self, record, changes, message):
        with pytest.raises(ValueError, match=message):
            merge([record(), record(**changes)])

    def test_geometric_mean(self):
        assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
        assert geometric_mean([]) is None


class TestTerminal:
    def test_header_rows_and_summary(self, record):
        text = shown(record())
        assert "NVIDIA H200, driver 580.159.04" in text
        assert "copy 4000 GB/s, empty kernel 1.10 us (graph)" in text
        assert "moe.topk_gate" in text
        assert "every peer: geometric mean 1.40 over 24 rows, worst 1.40" in text
        assert "left out: v3 against vllm: router: no kernel" in text

    def test_mean_over_engines_leaves_the_references_out(self, record, row):
        text = shown(record([row(us=1.0, factors=(("vllm", 2.0), ("reference", 1.5)))]))
        assert "every peer: geometric mean 1.50 over 1 rows" in text
        assert "kernels of other projects: geometric mean 2.00 over 1 rows" in text

    def test_slow_rows_are_named(self, record, row):
        text = shown(record([row(us=2.0, factors=(("vllm", 0.9),))]))
        assert "missed: moe.topk_gate v3-decode tokens=64: 0.9 against vllm instead of 0.95" in text

    def test_mismatches_are_shown(self, record, row):
        one = row()
        one.peers[0].agreement, one.peers[0].difference = (
            "different",
            "3 of 8 elements differ, first at [0, 1]: 1 for 2",
        )
        ours = row("quant.per_token_cast", agreement="different", difference="1 of 8 elements differ")
        text = shown(record([one, ours]))
        assert "vllm DIFFERS" in text
        assert "different: vllm: moe.topk_gate in 1 rows; moe.topk_gate v3-decode tokens=64: 3 of 8 elements" in text
        assert "first at [0, 1]: 1 for 2" in text
        assert "tk-serving DIFFERS" in text
        assert "different: tk-serving: quant.per_token_cast" in text

    def test_steps_of_a_chain_that_differ_are_shown(self, record):
        one = record()
        step = {"place": "router", "operators": ["topk_gate"], "ours": "equal", "engine": "different"}
        one.chains = [dataclasses.replace(one.chains[0], tokens=count, steps=[step]) for count in (1, 64)]
        line = "different: chain v3: router: vllm at 1, 64 tokens"
        assert line in shown(one)
        assert f"- {line}" in page(one, "a.json")

    def test_steps_that_were_timed_are_shown(self, record):
        one = record()
        one.chains[0].steps = [{"place": "router", "ours": "equal", "engine": "equal", "us": 2.5, "engine_us": 3.0}]
        line = "chain v3, 64 tokens, us of ours / vllm alone: router 2.50 / 3.00"
        assert line in shown(one)
        assert f"- {line}" in page(one, "a.json")

    def test_absent_peers_and_errors_are_shown(self, record, row):
        one, two = row(factors=()), row(tokens=8, factors=())
        for each in (one, two):
            each.peers = [type(row().peers[0])("sglang", absent="sglang is not installed [extra]")]
        broken = row(us=None, error="no kernel for this call: too wide", factors=())
        text = shown(record([one, two, broken]))
        assert "absent: sglang in 2 rows: sglang is not installed [extra]" in text
        assert "no kernel for this call: too wide" in text

    def test_an_early_end_is_shown(self, record):
        assert "stopped early: interrupted" in shown(record(aborted="interrupted"))

    def test_variants_of_one_workload_are_told_apart(self, record, row):
        rows = [row(params={"experts": 256, "packed": flag}) for flag in (False, True)]
        text = shown(record(rows))
        assert "moe.topk_gate (packed=True)" in text
        assert "experts" not in text

    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, ""), (0.0, "0"), (1234.5, "1234"), (99.44, "99.4"), (4.5, "4.50"), (0.0123, "0.012")],
    )
    def test_three_digits(self, value, text):
        assert report.number(value) == text


class TestPlot:
    def test_one_file_or_one_for_each_family(self, record, tmp_path):
        pytest.importorskip("matplotlib")
        from tk_serving.bench.plot import plot

        assert plot(record(), tmp_path / "all.png") == [tmp_path / "all.png"]
        files = plot(record(), tmp_path / "bench-{family}.png")
        assert [file.name for file in files] == ["bench-moe.png", "bench-quant.png"]
        assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
        assert plot(record([]), tmp_path / "none.png") == []

    def test_rows_without_times_do_not_break_it(self, record, row, tmp_path):
        pytest.importorskip("matplotlib")
        from tk_serving.bench.plot import plot

        rows = [row(tokens=1), row(tokens=8, us=None, factors=(), error="no kernel")]
        assert plot(record(rows), tmp_path / "a.png")


class TestPage:
    def test_every_number_comes_from_the_record(self, record):
        text = page(record(), "docs/records/bench-h200.json", ["records/bench-moe.png"])
        assert text.startswith("# Performance")
        assert "do not edit" in text
        assert "![Achieved bandwidth of moe](records/bench-moe.png)" in text
        assert "| moe.topk_gate | v3-decode | 64 | 2.06 |" in text
        assert "| v3 | 64 | 50.0 | vllm | 70.0 | 1.40 | router |" in text
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines if "moe.topk_gate" in line}) == 1

    def test_pages_regenerate_alike(self, record, tmp_path):
        record().save(tmp_path / "a.json")
        assert page(Record.load(tmp_path / "a.json"), "a.json") == page(record(), "a.json")


class TestCompare:
    def pair(self, record, row, factor, **changes):
        old = record([row(tokens=8, us=10.0), row(tokens=64, us=20.0)])
        return old, record([row(tokens=8, us=10.0 * factor), row(tokens=512, us=20.0)], **changes)

    def test_a_regression_is_found(self, record, row):
        found = comparing.compare(*self.pair(record, row, 1.5))
        assert [change.name.split(" {")[0] for change in found.regressions] == [
            "moe.topk_gate v3-decode tokens=8 graph"
        ]
        assert found.only_old[0].startswith("moe.topk_gate v3-decode tokens=64")
        assert found.only_new[0].startswith("moe.topk_gate v3-decode tokens=512")
        assert "1 slower, 0 faster" in comparing.summary(found)

    def test_noise_is_none(self, record, row):
        # 10 % slower, but the spreads (5 % down, 10 % up) touch.
        assert comparing.compare(*self.pair(record, row, 1.1)).regressions == []

    def test_an_improvement_is_none(self, record, row):
        found = comparing.compare(*self.pair(record, row, 0.5))
        assert found.regressions == []
        assert found.changes[-1].improvement

    def test_other_devices_are_named(self, record, row):
        found = comparing.compare(*self.pair(record, row, 1.0, device="NVIDIA H100", copy_gbps=3000.0))
        assert found.warnings == ["device: NVIDIA H200 then NVIDIA H100", "copy bandwidth: 4000 then 3000 GB/s"]

    def test_chains_are_rows_too(self, record):
        assert any(
            "chain v3 against vllm tokens=64" in change.name for change in comparing.compare(record(), record()).changes
        )


def test_publish_writes_all_files_and_reports_failures(record, row, tmp_path, capsys):
    assert run.publish(record(), tmp_path / "a.json", None, tmp_path / "a.md", None) is False
    assert "a.json" in capsys.readouterr().out
    assert (tmp_path / "a.md").read_text().startswith("# Performance")
    assert run.publish(record([row(error="broken")]), None, None, None, None) is True
    assert run.publish(record([row(agreement="different")]), None, None, None, None) is True
    assert run.publish(record(aborted="lost"), None, None, None, None) is True
