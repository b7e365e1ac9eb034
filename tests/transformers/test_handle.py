"""Applying and reverting: what changes, what does not, and what others do meanwhile."""

import copy
import io
import logging
import os
import pickle
import subprocess
import sys
import types

import pytest
import torch
from tiny_models import SITES
from torch import nn

import tk_serving_patches
from tk_serving_patches import PatchError, apply
from tk_serving_patches.transformers import sites
from tk_serving_patches.transformers._instances import ModuleSite


def state(model):
    """Everything in the instances' dictionaries, by identity."""
    return [[(key, id(value)) for key, value in module.__dict__.items()] for module in model.modules()]


def rows(handle):
    return {row.site: row for row in handle.report()}


def mlp_of(model):
    return model.model.layers[0].mlp


@pytest.fixture
def model(make):
    return make("v3").eval()


class TestRevert:
    @pytest.mark.parametrize("name", SITES)
    def test_restores_the_instances_exactly(self, name, make):
        model = make(name)
        before = state(model)
        forwards = {type(m): type(m).forward for m in model.modules()}
        handle = apply(model)
        assert state(model) != before
        assert {row.site: row.modules for row in handle.report() if row.modules} == SITES[name]
        handle.revert()
        assert state(model) == before
        assert {type(m): type(m).forward for m in model.modules()} == forwards

    def test_twice_does_nothing(self, model):
        handle = apply(model)
        handle.revert()
        before = state(model)
        handle.revert()
        assert state(model) == before

    def test_keeps_an_own_forward_of_the_instance(self, model):
        mlp = mlp_of(model)
        mlp.forward = own = types.MethodType(type(mlp).forward, mlp)
        apply(model).revert()
        assert mlp.__dict__["forward"] is own

    def test_context(self, model):
        before = state(model)
        with apply(model) as handle:
            assert handle.report().patched
        assert state(model) == before

    def test_exception_inside_the_context(self, model):
        before = state(model)
        with pytest.raises(KeyError, match="mine"), apply(model):
            raise KeyError("mine")
        assert state(model) == before

    def test_does_not_keep_the_model_alive(self, make):
        import gc
        import weakref

        model = make("v3")
        gone = weakref.ref(model)
        handle = apply(model)
        handle.revert()
        del model, handle
        gc.collect()
        assert gone() is None


class TestTwice:
    def test_second_call_changes_nothing(self, model):
        before = state(model)
        first = apply(model)
        patched = state(model)
        second = apply(model)
        assert state(model) == patched
        assert second.report().patched == first.report().patched
        second.revert()
        assert state(model) == patched
        first.revert()
        assert state(model) == before

    def test_second_call_adds_what_is_missing(self, model):
        before = state(model)
        first = apply(model, ops=["swiglu"])
        second = apply(model, ops=["swiglu", "experts"])
        assert second.report().patched == ["experts", "swiglu"]
        first.revert()
        assert "forward" not in mlp_of(model).__dict__
        second.revert()
        assert state(model) == before

    def test_other_models_stay_as_they_are(self, make):
        one, other = make("v3"), make("v3")
        before = state(other)
        with apply(one):
            assert state(other) == before


class TestCopies:
    def test_deepcopy_is_patched_and_independent(self, model, tokens):
        with torch.no_grad(), apply(model) as handle:
            twin = copy.deepcopy(model)
            forward = mlp_of(twin).__dict__["forward"]
            assert forward.__self__ is mlp_of(twin)
            assert torch.equal(twin(tokens).logits, model(tokens).logits)
            handle.revert()
            with apply(twin) as adopted:  # nobody else can revert the copy
                assert adopted.report().patched == handle.report().patched
            assert "forward" not in mlp_of(twin).__dict__

    @pytest.mark.parametrize("save", ["pickle", "torch"])
    def test_pickle_loads_the_stock_model(self, save, model, tokens):
        with torch.no_grad():
            stock = model(tokens).logits
            buffer = io.BytesIO()
            with apply(model):
                (pickle.dump if save == "pickle" else torch.save)(model, buffer)
            buffer.seek(0)
            loaded = pickle.load(buffer) if save == "pickle" else torch.load(buffer, weights_only=False)
            assert torch.equal(loaded(tokens).logits, stock)
            with apply(loaded, strict=True) as handle:
                assert handle.report().patched

    def test_state_dict(self, model):
        before = model.state_dict()
        with apply(model):
            patched = model.state_dict()
            model.load_state_dict(before)
        assert patched.keys() == before.keys()
        assert all(patched[key].data_ptr() == before[key].data_ptr() for key in before)

    def test_save_pretrained(self, model, tokens, tmp_path):
        with torch.no_grad(), apply(model):
            model.save_pretrained(tmp_path)
            patched = model(tokens).logits
        loaded = type(model).from_pretrained(tmp_path).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(tokens).logits, patched, rtol=1e-4, atol=1e-4)


class TestOthers:
    """Other code that replaces the same forwards."""

    def test_before_us(self, model):
        mlp = mlp_of(model)
        mlp.forward = theirs = lambda x: x
        handle = apply(model)
        row = rows(handle)["swiglu"]
        assert row.status == "skipped"
        assert "1 of 2 modules was already replaced by test_handle" in row.reason
        assert mlp.forward is theirs
        handle.revert()
        assert mlp.forward is theirs

    def test_class_before_us(self, model, monkeypatch):
        def forward(self, x):
            return x

        monkeypatch.setattr(type(mlp_of(model)), "forward", forward)
        row = rows(apply(model))["swiglu"]
        assert row.status == "skipped"
        assert "was already replaced by test_handle" in row.reason

    def test_after_us(self, model):
        before = state(model)
        handle = apply(model)
        mlp = mlp_of(model)
        ours, mlp.forward = mlp.forward, lambda x: ours(x)
        theirs = mlp.forward
        assert handle.foreign() == ["DeepseekV3MLP.forward"]
        with pytest.raises(PatchError, match=r"replaced by other code after tk-serving, not restored: DeepseekV3MLP"):
            handle.revert()
        assert mlp.forward is theirs
        del mlp.forward
        assert state(model) == before

    @pytest.mark.parametrize("ours_first", [True, False])
    def test_hooks_of_accelerate(self, ours_first, model, tokens):
        hooks = pytest.importorskip("accelerate.hooks")

        class Count(hooks.ModelHook):
            calls = 0

            def pre_forward(self, module, *args, **kwargs):
                Count.calls += 1
                return args, kwargs

        Count.calls = 0
        mlp = mlp_of(model)
        with torch.no_grad():
            stock = model(tokens).logits
            handle = apply(model) if ours_first else None
            hooks.add_hook_to_module(mlp, Count())
            handle = handle or apply(model, strict=True)
            forward = mlp.__dict__["_old_forward"]
            assert forward.__func__.tk_serving_site == "swiglu"
            torch.testing.assert_close(model(tokens).logits, stock, rtol=1e-4, atol=1e-4)
            assert Count.calls == 1
            handle.revert()
            assert mlp.__dict__["_old_forward"].__func__ is type(mlp).forward
            assert torch.equal(model(tokens).logits, stock)
            assert Count.calls == 2

    def test_unknown_source(self, model, monkeypatch):
        monkeypatch.setitem(sites.SOURCES["MLP"], "5.16.0", "0123456789abcdef")
        handle = apply(model)
        row = rows(handle)["swiglu"]
        assert row.status == "skipped"
        assert row.reason.startswith("the source of transformers.models.deepseek_v3.modeling_deepseek_v3:DeepseekV3MLP")
        assert "differs from what was tested (5.16.0)" in row.reason
        assert rows(handle)["experts"].status == "patched"
        handle.revert()

    def test_strict(self, model, monkeypatch):
        monkeypatch.setitem(sites.SOURCES["RMSNorm"], "5.16.0", "0123456789abcdef")
        before = state(model)
        with pytest.raises(
            PatchError, match=r"(?s)not every site could be patched:.*deepseek_v3: rms-norm: the source"
        ):
            apply(model, strict=True)
        assert state(model) == before


class TestChoice:
    def test_by_site_or_operator(self, model):
        with apply(model, ops=["swiglu", "top2_sum_gate"]) as handle:
            report = rows(handle)
            assert handle.report().patched == ["routing", "swiglu"]
            assert (report["experts"].status, report["experts"].reason) == ("switched off", "not among ops")

    def test_disabled_by_the_environment(self, model, monkeypatch):
        from tk_serving.config import settings

        monkeypatch.setattr(settings, "disable", frozenset({"experts"}))
        with apply(model) as handle:
            row = rows(handle)["experts"]
            assert (row.status, row.reason) == ("switched off", "experts is in TK_SERVING_DISABLE")

    def test_switches(self, make):
        model = make("v4")
        names = "routing", "hash_routing", "experts", "swiglu", "rms_norm", "unweighted_rms_norm"
        off = dict.fromkeys(names, False)
        with tk_serving_patches.apply_tilekernels_to_deepseek_v4(model, **off, mhc_head=False) as handle:
            assert handle.report().patched == ["mhc-pre", "mhc-post"]

    def test_unknown_names(self, model):
        with pytest.raises(
            ValueError, match=r"ops: expected names of sites or operators such as swiglu.*got 'swigluu'"
        ):
            apply(model, ops=["swigluu"])
        with pytest.raises(TypeError, match="collection of names"):
            apply(model, ops="swiglu")
        with pytest.raises(TypeError, match=r"unexpected switch 'mhc_pre'; known: .*'rms_norm'"):
            tk_serving_patches.apply_tilekernels_to_deepseek_v3(model, mhc_pre=False)

    def test_unknown_models(self, model):
        with pytest.raises(ValueError, match="got Linear"):
            apply(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"got 'vllm' \(vLLM and SGLang are patched by --kernel-backend"):
            apply("vllm")
        with pytest.raises(ValueError, match="expected a model of this family, got DeepseekV3ForCausalLM"):
            tk_serving_patches.apply_tilekernels_to_deepseek_v4(model)

    def test_unsuited_module_is_left_alone(self, model):
        model.model.layers[1].mlp.shared_experts.act_fn = nn.GELU()
        with apply(model) as handle:
            row = rows(handle)["swiglu"]
            assert (row.status, row.modules) == ("patched", 1)
            assert row.reason == "1 of 2 modules left alone: activation GELU"

    def test_no_module_of_a_class(self, make):
        with apply(make("v3", first_k_dense_replace=2)) as handle:
            row = rows(handle)["experts"]
            assert (row.status, row.reason) == ("not used by this model", "no such module")

    def test_report_is_logged(self, model, caplog):
        with caplog.at_level(logging.INFO, logger="tk_serving_patches.transformers.api"), apply(model):
            assert "deepseek_v3  rms-norm  patched  9" in " ".join(caplog.text.split("\n")).replace("   ", "  ")


class TestClasses:
    def test_models_made_from_now_on(self, make, tokens):
        with torch.no_grad():
            stock = make("v3").eval()(tokens).logits
            handle = apply("deepseek_v3", strict=True)
            try:
                model = make("v3").eval()
                assert not any("forward" in module.__dict__ for module in model.modules())
                patched = model(tokens).logits
                assert {row.status for row in apply(model).report() if row.family == "deepseek_v3"} == {"patched"}
                again = tk_serving_patches.apply_tilekernels_to_deepseek_v3()
                assert {row.reason for row in again.report()} == {"applied before"}
                again.revert()
                assert not torch.equal(patched, stock)
            finally:
                handle.revert()
            torch.testing.assert_close(patched, stock, rtol=1e-4, atol=1e-4)
            assert torch.equal(model(tokens).logits, stock)

    def test_every_class(self):
        with apply("transformers", strict=True) as handle:
            assert {row.family for row in handle.report()} == {f"deepseek_{v}" for v in ("v2", "v3", "v32", "v4")}
            assert {row.status for row in handle.report()} == {"patched"}
            for row in handle.report():
                assert row.modules == 0


class TestSites:
    """The tables themselves."""

    def test_version(self):
        """The matrix tests the version that it says it tests."""
        import transformers

        assert transformers.__version__ == os.environ.get("EXPECTED_TRANSFORMERS", transformers.__version__)

    @pytest.mark.parametrize("family", sites.FAMILIES)
    def test_installed_sources_are_known(self, family):
        for site in sites.FAMILIES[family]:
            assert isinstance(site, ModuleSite)
            assert site.fingerprint() in site.sources.values(), f"{site.function.target}: {site.fingerprint()!r}"

    @pytest.mark.parametrize("family", sites.FAMILIES)
    def test_names_are_unique(self, family):
        names = [site.name for site in sites.FAMILIES[family]]
        assert len(set(names)) == len(names)

    def test_operators_are_declared(self):
        from tk_serving.operator import find

        for family in sites.FAMILIES.values():
            for site in family:
                for name in site.operators:
                    assert find(name).name == name


def test_importing_does_not_import_transformers():
    code = "import sys, tk_serving_patches.transformers; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
