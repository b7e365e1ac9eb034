"""What the integrations with serving engines share."""

import gc
import weakref

import pytest
import torch

from tk_serving.config import settings
from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving_patches import Function, Ledger, Row, Site, positions, server


def a_site(name, target="tk_serving_patches.positions:in_token_order"):
    patches = (Function(target, lambda original: lambda *args: original(*args)),)
    return Site(name=name, operators=("topk_gate",), patches=patches, why="", how="", until="")


def test_every_reason_is_in_the_refusal():
    server.refuse([])
    with pytest.raises(RuntimeError, match=r"cannot be honoured:\n  - one\n  - two$"):
        server.refuse(["one", "two"])


def test_models_without_call_sites_are_refused():
    server.check_model("A", {"A": ()})
    with pytest.raises(RuntimeError, match="no call sites are known for B; known models: A"):
        server.check_model("B", {"A": ()})


def test_names_to_switch_off_are_operators_or_sites(monkeypatch):
    monkeypatch.setattr(settings, "disable", frozenset({"topk_gate", "a-site", "a-typo"}))
    (reason,) = server.unknown_names([a_site("a-site")])
    assert reason.startswith("TK_SERVING_DISABLE names a-typo; known: ")


def test_sites_of_other_models_are_not_used_and_a_model_without_any_is_refused():
    ledger = Ledger()
    try:
        rows = server.apply_all(
            ledger, [a_site("one"), a_site("two", "tk_serving_patches.positions:constant")], "A", ["one"]
        )
        assert rows == [Row("one", "topk_gate", "patched"), Row("two", "topk_gate", "not used", "no call in A")]
    finally:
        ledger.revert()
    with pytest.raises(RuntimeError, match="no_such_module cannot be imported"):
        server.apply_all(Ledger(), [a_site("one", "tk_serving_patches.no_such_module:f")], "A", ["one"])


def test_the_report_is_aligned():
    rows = [Row("a", "b", "patched"), Row("long-name", "b", "skipped", "why")]
    assert server.table(rows).splitlines() == [
        "  site       operator  status   reason",
        "  a          b         patched",
        "  long-name  b         skipped  why",
    ]


def test_rows_in_token_order_are_what_the_reduction_reads():
    rows = torch.randn(6, 8)
    places, weights = positions.in_token_order(3, 2, rows.device), positions.constant(2.5, 3, 2, rows.device)
    torch.testing.assert_close(reduce_fused(rows, weights, places), rows.view(3, 2, 8).sum(1) * 2.5)
    larger = positions.in_token_order(1 << 15, 3, rows.device)
    assert larger[-1, -1] == 3 * (1 << 15) - 1
    assert positions.in_token_order(3, 2, rows.device).data_ptr() == larger.data_ptr()


def test_a_table_that_a_captured_graph_reads_stays_when_a_larger_one_replaces_it(monkeypatch):
    monkeypatch.setattr(positions, "_weights", {})
    alive = weakref.ref(positions.constant(1.5, 3, 2, torch.device("cpu"))._base)
    larger = positions.constant(1.5, 1 << 15, 3, torch.device("cpu"))
    gc.collect()
    assert alive() is not None
    assert alive().numel() < larger.numel()
