"""The engine that replaces functions and puts them back."""

import sys
import textwrap
import types

import pytest
import torch

from tk_serving_patches import Function, Ledger, Override, PatchError, Site, fingerprint

SOURCE = """
    def scale(x):
        # a comment
        return 2 * x

    def other(x):
        return x

    class Layer:
        def forward(self, x):
            return x + 1

        @staticmethod
        def native(x):
            return x + 10

        @classmethod
        def named(cls, x):
            return cls.__name__, x
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A package with one module, and a second module that imported a function by name."""
    package = tmp_path / "victim"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text(textwrap.dedent(SOURCE))
    (package / "model.py").write_text(
        "from victim.layers import scale as resize\n\ndef run(x):\n    return resize(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import victim.layers
    import victim.model

    yield victim
    for name in [n for n in sys.modules if n.partition(".")[0] == "victim"]:
        del sys.modules[name]


def site(*targets, make=None, **fields):
    make = make or (lambda original: lambda *args: ("ours", original(*args)))
    return Site(
        name=fields.pop("name", "a-site"),
        operators=fields.pop("operators", ("an_operator",)),
        patches=tuple(Function(f"victim.layers:{t}", make) for t in targets),
        why="",
        how="",
        until="",
        **fields,
    )


def test_functions_methods_and_their_importers_are_replaced_and_restored(target):
    layers, model = target.layers, target.model
    before = {name: vars(layers.Layer)[name] for name in ("forward", "native", "named")}
    original = layers.scale
    ledger = Ledger()
    rows = ledger.apply(site("scale", "Layer.forward", "Layer.native", "Layer.named"))
    assert [(r.site, r.operator, r.status, r.reason) for r in rows] == [("a-site", "an_operator", "patched", "")]
    assert layers.scale(3) == ("ours", 6)
    assert model.run(3) == ("ours", 6)
    assert layers.Layer().forward(1) == ("ours", 2)
    assert layers.Layer.native(1) == ("ours", 11)
    assert layers.Layer.named(1) == ("ours", ("Layer", 1))
    assert layers.scale.__name__ == "scale"
    ledger.revert()
    assert layers.scale is original
    assert model.resize is original
    assert {name: vars(layers.Layer)[name] for name in before} == before
    assert ledger.rows() == []


def test_applying_twice_changes_nothing(target):
    ledger = Ledger()
    once = site("scale")
    ledger.apply(once)
    function = target.layers.scale
    assert ledger.apply(once) == ledger.rows()
    assert target.layers.scale is function
    ledger.revert()
    assert target.layers.scale(3) == 6


def test_two_sites_on_one_function_are_undone_last_first(target):
    original = target.layers.scale
    ledger = Ledger()
    ledger.apply(site("scale", name="first", make=lambda f: lambda x: f(x) + 1))
    second = site("scale", name="second", make=lambda f: lambda x: 10 * f(x))
    rows = ledger.apply(second)
    assert rows[0].status == "skipped"  # the first site's function is foreign to the second
    assert "already replaced by test_engine" in rows[0].reason
    assert target.layers.scale(3) == 7
    ledger.revert()
    assert target.layers.scale is original


def test_decorators_of_torch_are_not_other_code(target, monkeypatch):
    monkeypatch.setattr(target.layers, "scale", torch.no_grad()(target.layers.scale))
    (row,) = Ledger().apply(site("scale"))
    assert row.status == "patched"


def test_code_that_replaced_the_function_before_us_is_left_alone(target, monkeypatch):
    monkeypatch.setattr(target.layers, "scale", lambda x: "foreign")
    (row,) = Ledger().apply(site("scale"))
    assert row.status == "skipped"
    assert row.reason == f"victim.layers:scale was already replaced by {__name__}"
    assert target.layers.scale(1) == "foreign"


def test_code_that_replaces_the_function_after_us_is_reported_and_kept(target):
    ledger = Ledger()
    ledger.apply(site("scale", "Layer.forward"))
    assert ledger.foreign() == []
    target.layers.scale = lambda x: "foreign"
    assert ledger.foreign() == ["victim.layers:scale"]
    with pytest.raises(PatchError, match=r"not restored: victim\.layers:scale"):
        ledger.revert()
    assert target.layers.scale(1) == "foreign"
    assert target.layers.Layer().forward(1) == 2


def test_a_site_is_applied_whole_or_not_at_all(target):
    original = target.layers.scale
    (row,) = Ledger().apply(site("scale", "Layer.missing"))
    assert row.status == "skipped"
    assert row.reason == "victim.layers:Layer.missing does not exist"
    assert target.layers.scale is original


def test_missing_modules_and_classes_are_reasons(target):
    absent = Site("s", ("o",), (Function("victim.absent:f", lambda f: f),), "", "", "")
    assert Ledger().apply(absent)[0].reason.startswith("victim.absent cannot be imported: ModuleNotFoundError")
    assert (
        Ledger().apply(site("Nothing.forward"))[0].reason == "victim.layers:Nothing.forward does not exist: no Nothing"
    )


def test_only_tested_sources_are_patched(target):
    known = fingerprint(target.layers.scale)
    assert Ledger().apply(site("scale", sources={"1.0": "0" * 16}))[0].reason == (
        "the source of victim.layers:scale differs from what was tested (1.0)"
    )
    assert target.layers.scale(1) == 2
    ledger = Ledger()
    assert ledger.apply(site("scale", sources={"1.0": "0" * 16, "1.1": known}))[0].status == "patched"
    ledger.revert()


def test_functions_relied_on_are_part_of_the_fingerprint(target):
    patch = Function("victim.layers:scale", lambda f: f, relies_on=("victim.layers:other",))
    both = Site("s", ("o",), (patch,), "", "", "", sources={"1.0": fingerprint(target.layers.scale)})
    assert Ledger().apply(both)[0].status == "skipped"
    assert both.fingerprint() == fingerprint(target.layers.scale, target.layers.other)


def test_fingerprint_ignores_comments_and_indentation_only():
    from tk_serving_patches.engine import fingerprint_of_source as of

    assert of("def f(x):\n    return x\n") == of("    def f(x):\n        # why\n\n        return x\n")
    assert of("def f(x):\n    return x\n") != of("def f(x):\n    return x + 1\n")


@pytest.mark.parametrize("name", ["a-site", "an_operator"])
def test_switched_off_sites_and_operators(target, name):
    (row,) = Ledger().apply(site("scale"), disabled={name})
    assert (row.status, row.reason) == ("switched off", f"{name} is in TK_SERVING_DISABLE")
    assert target.layers.scale(1) == 2


def test_reasons_of_the_site_and_of_the_caller(target):
    assert Ledger().apply(site("scale", unsuitable=lambda: "wrong platform"))[0].reason == "wrong platform"
    (row,) = Ledger().apply(site("scale"), skip="no call in ThisModel", status="not used")
    assert (row.status, row.reason) == ("not used", "no call in ThisModel")
    assert target.layers.scale(1) == 2


def test_alternatives_for_two_platforms_share_a_name_and_one_report(target):
    ledger = Ledger()
    ledger.apply(site("scale", unsuitable=lambda: "for cuda"))
    ledger.apply(site("scale"))
    assert [row.status for row in ledger.rows()] == ["patched"]
    ledger.revert()
    ledger.apply(site("scale"))
    ledger.apply(site("scale", unsuitable=lambda: "for cuda"))
    assert [row.status for row in ledger.rows()] == ["patched"]
    ledger.revert()


def test_an_importer_that_cannot_be_rebound_is_an_error(target):
    class Stubborn(types.ModuleType):
        def __setattr__(self, name, value):
            pass

    stubborn = Stubborn("victim.stubborn")
    vars(stubborn)["scale"] = target.layers.scale
    sys.modules["victim.stubborn"] = stubborn
    with pytest.raises(PatchError, match=r"still bound to the original of scale: victim\.stubborn\.scale"):
        Ledger().apply(site("scale"))
    assert target.layers.scale(1) == 2


@pytest.fixture(scope="module")
def victim_op():
    library = torch.library.Library("victim_ops", "DEF")
    library.define("double(Tensor! out, Tensor x, int times=2) -> ()")

    def double(out, x, times=2):
        out.copy_(x * times)

    library.impl("double", double, "CPU")
    yield torch.ops.victim_ops.double
    library._destroy()


def override(schema="(Tensor! out, Tensor x, int times) -> ()", operator="victim_ops::double"):
    def make(original):
        def double(out, x, times=2):
            original(out, x, times)
            out.add_(100)

        return double

    return Site("an-op", ("an_operator",), (Override(operator, "CPU", make, schema),), "", "", "")


def test_registered_operators_are_overridden_with_the_original_at_hand(victim_op):
    x, out = torch.ones(2), torch.zeros(2)
    ledger = Ledger()
    assert ledger.apply(override())[0].status == "patched"
    victim_op(out, x, 3)
    assert out.tolist() == [103, 103]
    ledger.revert()
    victim_op(out, x)
    assert out.tolist() == [2, 2]


def test_unknown_operators_and_other_schemas_are_reasons(victim_op):
    assert Ledger().apply(override(operator="victim_ops::triple"))[0].reason == (
        "torch.ops.victim_ops.triple (CPU) is not registered"
    )
    assert Ledger().apply(override("(Tensor! out, Tensor x) -> ()"))[0].reason == (
        "torch.ops.victim_ops.double (CPU) has another schema than tested: (Tensor! out, Tensor x, int times) -> ()"
    )
