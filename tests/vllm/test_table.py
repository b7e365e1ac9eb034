"""The table of measurements: generated from the record, current, and obeyed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tk_serving_patches.table import text
from tk_serving_vllm import table
from tk_serving_vllm.sites import SITES, _calls

RECORD = Path(__file__).parents[2] / "docs/records/bench-h200.json"


@pytest.fixture(autouse=True)
def _nothing_chosen():
    yield
    table.forget()


def test_the_table_is_that_of_the_record():
    generated = text(table.generate(json.loads(RECORD.read_text()), SITES))
    assert table.FILE.read_text() == generated, f"run: python -m tk_serving_vllm.table {RECORD}"


def row(operator, tokens, us, theirs, model="v4-flash", **more):
    peers = [{"name": "vllm", "us": theirs}, {"name": "sglang", "us": us / 9}]
    return {
        "operator": f"f.{operator}",
        "tokens": tokens,
        "us": us,
        "peers": peers,
        "model": model,
        "mode": "graph",
        "error": "",
        **more,
    }


def generate(*rows):
    record = dict.fromkeys(("device", "driver", "versions", "revision", "date"), "") | {"rows": rows}
    sites = [SimpleNamespace(name="s", operators=("a", "b")), SimpleNamespace(name="shared-experts", operators=("a",))]
    return table.generate(record, sites)["sites"]


def test_operators_of_a_site_are_added_up_where_vllm_has_a_kernel():
    assert generate(row("a", 1, 2.0, 4.0), row("b", 1, 2.0, 2.0)) == {"s": {"v4-flash": [[1, 1.5]]}}
    assert generate(row("a", 1, 2.0, 4.0), row("b", 1, 9.0, None)) == {"s": {"v4-flash": [[1, 2.0]]}}
    assert generate(row("b", 1, 9.0, None)) == {}
    assert generate(row("a", 1, 2.0, 4.0, mode="cold"), row("a", 8, 2.0, 4.0, error="broken")) == {}


def test_layers_are_added_up_for_the_site_that_they_belong_to():
    def layer(us, theirs, groups):
        return row("a", 8, us, theirs, params={"groups": groups})

    names = ("fp8-linear", "output-projection", "s")
    record = dict.fromkeys(("device", "driver", "versions", "revision", "date"), "")
    record["rows"] = [layer(2.0, 4.0, 0), layer(3.0, 5.0, 8), layer(2.0, 2.0, 0)]
    found = table.generate(record, [SimpleNamespace(name=name, operators=("a",)) for name in names])["sites"]
    ratios = {name: by_model["v4-flash"] for name, by_model in found.items()}
    assert ratios == {"fp8-linear": [[8, 1.5]], "output-projection": [[8, 1.667]], "s": [[8, 1.0]]}
    record["rows"] = record["rows"][:1]
    assert (
        "output-projection" not in table.generate(record, [SimpleNamespace(name=names[1], operators=("a",))])["sites"]
    )


@pytest.fixture
def measured(monkeypatch):
    def use(**ratios):
        sites = {name: {"v4-flash": rows} for name, rows in ratios.items()}
        monkeypatch.setattr(table.measured, "read", lambda: {"sites": sites})
        table.choose(4096, 256)

    return use


def test_the_nearest_measured_number_of_tokens_decides(measured):
    measured(s=[[1, 0.8], [64, 1.2], [4096, 0.97]])
    assert table.slower("s", 1) == table.slower("s", 7) == "0.80x vLLM's speed at 1 tokens in the record"
    assert table.slower("s", 9) is table.slower("s", 8192) is None
    assert table.slower("other", 1) is table.slower("s", 0) is None
    table.choose(4096, 255)
    assert table.slower("s", 1) is None


def test_hyper_connections_may_lose_more_because_vllm_compiles_theirs(measured):
    measured(**{"mhc-head": [[1, 0.9], [64, 0.8]]})
    assert table.slower("mhc-head", 1) is None
    assert table.slower("mhc-head", 64) == "0.80x vLLM's speed at 64 tokens in the record"


def test_the_report_says_what_stays_stock(measured):
    measured(never=[[1, 0.8], [64, 0.9]], partly=[[1, 0.8], [64, 1.9]], always=[[1, 1.0]])
    assert table.verdict("never") == (True, "stock by table: 0.80x at 1, 0.90x at 64 tokens")
    assert table.verdict("partly") == (False, "in part stock by table: 0.80x at 1 tokens")
    assert table.verdict("always") == table.verdict("unknown") == (False, "")


def test_a_call_that_the_table_leaves_to_vllm_is_counted_with_the_reason(measured):
    import torch

    from tk_serving import dispatch
    from tk_serving.moe.topk_gate import topk_gate

    measured(s=[[1, 0.5]])
    assert not _calls.offer("s", 2, topk_gate, torch.zeros(2, 8), 2)
    assert _calls.offer("t", 2, topk_gate, torch.zeros(2, 8), 2)
    (counted,) = dispatch.counters()
    assert (counted["implementation"], counted["reason"]) == ("engine", "0.50x vLLM's speed at 1 tokens in the record")
