"""TK_SERVING_COMPARE: both functions run on the same input, and the first site that deviates is named."""

import sys
import types

import pytest
import torch

from tk_serving.config import settings
from tk_serving_patches import Function, Ledger, Site, comparing


@pytest.fixture(autouse=True)
def _fresh():
    comparing.reset()
    yield
    comparing.reset()


@pytest.fixture
def engine(monkeypatch):
    """A module of an engine with functions that return, that write, and that call each other."""
    module = types.ModuleType("compared_engine.module")
    exec(
        "def double(x):\n    return x * 2\n"
        "def add(out, x):\n    out += x\n"
        "def outer(x):\n    return double(x) + 1\n"
        "def pick(weights, ids):\n    return weights, ids\n",
        vars(module),
    )
    monkeypatch.setitem(sys.modules, "compared_engine.module", module)
    monkeypatch.setattr(settings, "compare", True)
    return module


def replace(**functions):
    ledger = Ledger()
    for name, (make, options) in functions.items():
        patch = Function(f"compared_engine.module:{name}", make, **options)
        ledger.apply(Site(name, ("topk_gate",), (patch,), why="w", how="h", until="u"))
    return ledger


def test_a_result_that_deviates_is_reported_under_its_site(engine, caplog):
    ledger = replace(double=(lambda original: lambda x: x * 2.1, {}), add=(lambda original: original, {}))
    x = torch.ones(4)
    assert torch.equal(engine.double(x), x * 2.1), "the replacement's result is used"
    engine.add(torch.zeros(4), x)
    assert comparing.first() == "double"
    assert "double is the first site to deviate" in caplog.text
    double, add = comparing.rows()
    assert double["beyond"] == 1
    assert double["largest"] == pytest.approx(0.05, rel=1e-3)
    assert add == {"site": "add", "calls": 1, "beyond": 0, "largest": 0.0, "mean": 0.0}
    ledger.revert()


def test_one_site_alone_can_be_replaced(engine):
    ledger = replace(double=(lambda original: lambda x: x * 3, {}), outer=(lambda original: lambda x: x - 1, {}))
    x = torch.ones(4)
    with comparing.only(["double"]):
        assert (engine.outer(x) == 4).all(), "the engine's outer function, our inner one"
    with comparing.only([]):
        assert (engine.outer(x) == 3).all()
    assert not comparing.rows(), "nothing was compared"
    assert (engine.outer(x) == 0).all()
    ledger.revert()


def test_tensors_that_are_written_are_compared_and_written_once(engine):
    def make(original):
        def add(out, x):
            out += x * 1.5

        return add

    ledger = replace(add=(make, {}))
    out = torch.ones(4)
    engine.add(out, torch.ones(4))
    assert torch.equal(out, torch.full((4,), 2.5))
    assert comparing.rows()[0]["largest"] == pytest.approx(0.25)
    ledger.revert()


def test_the_engines_function_runs_without_replacements_inside(engine):
    ledger = replace(
        double=(lambda original: lambda x: x * 2.1, {}), outer=(lambda original: lambda x: original(x) + 1, {})
    )
    engine.outer(torch.ones(4))
    found = {row["site"]: row["largest"] for row in comparing.rows()}
    assert found["outer"] == pytest.approx(1.1 / 3, rel=1e-3)
    assert found["double"] == pytest.approx(0.05, rel=1e-3)
    ledger.revert()


def test_order_bound_skipping_and_what_cannot_run_twice(engine):
    def by_id(result):
        order = result[1].argsort(-1)
        return tuple(t.gather(-1, order) for t in result)

    def flipped(original):
        return lambda weights, ids: (weights.flip(-1), ids.flip(-1))

    def skipping(original):
        def double(x):
            comparing.skip()
            return x * 3

        return double

    def wrong(original):
        return lambda out, x: None

    ledger = replace(pick=(flipped, {"in_order": by_id}), double=(skipping, {}), add=(wrong, {"comparable": False}))
    engine.pick(torch.rand(2, 3), torch.tensor([[4, 1, 2], [0, 9, 5]]))
    engine.double(torch.ones(2))
    engine.add(torch.ones(2), torch.ones(2))
    assert comparing.rows() == [{"site": "pick", "calls": 1, "beyond": 0, "largest": 0.0, "mean": 0.0}]
    ledger.revert()
    loose = replace(double=(lambda original: lambda x: x * 2.1, {"bound": 0.1}))
    engine.double(torch.ones(2))
    assert comparing.first() is None
    loose.revert()


def test_copies_keep_strides_and_the_padding_behind_them():
    padded = torch.arange(12.0).view(3, 4).t()[:3]  # column-major [3, 3], columns 4 apart
    copy = comparing._clone(padded)
    assert copy.stride() == padded.stride()
    assert torch.equal(copy, padded)
    assert copy.untyped_storage().nbytes() >= padded.untyped_storage().nbytes()


def test_distances():
    one = torch.ones(4)
    assert comparing.distance(one, one[:2]) == float("inf")
    assert comparing.distance(one.int(), torch.tensor([1, 1, 1, 2], dtype=torch.int32)) == 0.25
    nan = torch.tensor([1.0, float("nan")])
    assert comparing.distance(nan, nan) == 0.0
    assert comparing.distance(one[:2], nan) == float("inf")
