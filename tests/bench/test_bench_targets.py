"""What misses a target, and the file that says why."""

from pathlib import Path

import pytest

from tk_serving.bench import run, targets
from tk_serving.bench.page import page
from tk_serving.bench.record import ChainRow, Record
from tk_serving.operator import find

RECORDS = Path(__file__).parents[2] / "docs" / "records"


def moving(row, percent, **changes):
    """A row of an operator that only moves data."""
    one = row("moe.expand_to_fused", us=100.0, factors=(("vllm", 1.5),), **changes)
    one.pct_copy = percent
    return one


class TestMisses:
    def test_each_target(self, record, row):
        rows = [row(us=2.0, factors=(("vllm", 0.9),)), row(tokens=8, factors=(("vllm", 1.3),))]
        chains = [ChainRow("v3", tokens, peer="vllm", ratio=ratio) for tokens, ratio in ((64, 1.2), (8, 1.3))]
        found = targets.misses(record([*rows, moving(row, 89.9, tokens=4096)], chains=chains))
        assert [(miss.target, miss.name, miss.wanted) for miss in found] == [
            ("chain", "chain v3 tokens=64", 1.25),
            ("ratio", "moe.topk_gate v3-decode tokens=64", 0.95),
            ("copy", "moe.expand_to_fused v3-decode tokens=4096", 90.0),
        ]
        assert str(found[0]) == "chain v3 tokens=64: 1.2 against vllm instead of 1.25"
        assert str(found[2]) == ("moe.expand_to_fused v3-decode tokens=4096: 89.9% of the copy bandwidth instead of 90")

    def test_the_mean_is_over_all_rows(self, record, row):
        rows = [row(tokens=count, factors=(("vllm", 1.1), ("reference", 9.0))) for count in (1, 8)]
        found = targets.misses(record(rows, chains=[]))
        assert [(miss.target, miss.against) for miss in found] == [
            ("mean", "every peer"),
            ("mean", "kernels of other projects"),
        ]
        assert found[0].value == pytest.approx(1.1)

    @pytest.mark.parametrize(("tokens", "percent"), [(64, 20.0), (8192, 90.0), (4096, None)])
    def test_bandwidth_counts_for_many_tokens_only(self, record, row, tokens, percent):
        assert targets.misses(record([moving(row, percent, tokens=tokens)], chains=[])) == []

    def test_bandwidth_counts_for_data_movement_only(self, record, row):
        one = row(us=100.0, tokens=4096)
        one.pct_copy = 5.0
        assert find("expand_to_fused").moves_data
        assert not find("topk_gate").moves_data
        assert targets.misses(record([one], chains=[])) == []

    def test_rows_of_operators_that_are_gone(self, record, row):
        one = row("moe.no_such_operator", us=100.0, tokens=4096)
        one.pct_copy = 5.0
        assert targets.misses(record([one], chains=[])) == []


class TestCauses:
    def file(self, tmp_path, text):
        path = tmp_path / "misses.toml"
        path.write_text(text)
        return path

    @pytest.fixture
    def slow(self, record, row):
        return record([row(tokens=count, us=2.0, factors=(("vllm", 0.5),)) for count in (8, 64)], chains=[])

    def test_the_first_that_matches(self, tmp_path, slow):
        text = """
        [[miss]]
        operator = "moe.*"
        tokens = [64, "128*"]
        cause = "waits"
        [[miss]]
        target = "ratio"
        cause = "slow"
        [[miss]]
        operator = "chain *"
        cause = "launches"
        """
        causes = targets.load(self.file(tmp_path, text))
        found = {(miss.target, miss.tokens): cause for miss, cause in targets.explain(targets.misses(slow), causes)}
        assert found[("ratio", 64)] == "waits"
        assert found[("ratio", 8)] == "slow"
        assert found[("mean", None)] == targets.UNKNOWN
        assert [cause.cause for cause in targets.stale(targets.misses(slow), causes)] == ["launches"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[[miss]]\ncause = 'a'\n[[miss]]\noperator = 'x'", "miss 2: cause: expected a text, got none"),
            (
                "[[miss]]\ncause = 'a'\nrow = 1",
                "miss 1: expected cause, operator, workload, tokens, target, got",
            ),
            ("[[miss]]\ncause = 'a'\ntarget = 'speed'", "miss 1: target: expected one of ratio, copy, chain, mean"),
            ("[[miss", "misses.toml: "),
        ],
    )
    def test_other_files_are_refused(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=r"misses\.toml") as refused:
            targets.load(self.file(tmp_path, text))
        assert message in str(refused.value)

    def test_the_page_has_each_miss_with_its_cause(self, tmp_path, slow, capsys):
        slow.save(tmp_path / "record.json")
        self.file(tmp_path, "[[miss]]\ntokens = 64\ncause = 'waits'\n[[miss]]\ntokens = 1\ncause = 'gone'")
        run.publish(slow, None, None, tmp_path / "page.md", tmp_path / "record.json")
        text = (tmp_path / "page.md").read_text()
        row = "| moe.topk_gate v3-decode tokens={} | ratio | 0.500 | 0.95 | vllm | {} |"
        assert row.format(64, "(1)") in text
        assert "\n(1) waits\n" in text
        assert row.format(8, "cause not established") in text
        shown = " ".join(capsys.readouterr().out.split())
        assert "cause not established of 3 of 4 misses, such as the suite" in shown
        assert "explains no miss any more: gone" in shown

    def test_nothing_missed(self, record, row):
        text = page(record([row()], chains=[]), "a.json")
        assert "## Rows that miss a target\n\nTargets: geometric mean of the ratios at least 1.20" in text
        assert "\n\nNone.\n" in text


def test_published_causes():
    """They can be read, and each explains a row of the published record."""
    causes = targets.load(RECORDS / "misses.toml")
    assert targets.stale(targets.misses(Record.load(RECORDS / "bench-h200.json")), causes) == []
