"""Patched models compute what the stock ones compute, forward and backward, and are stock again afterwards."""

import pytest
import torch
from tiny_models import CONFIGS, SITES

from tk_serving import dispatch
from tk_serving_patches import apply


def off(a, b):
    """Distance relative to the size of b."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", CONFIGS)
class TestFloat32:
    def test_training_step(self, name, make, step):
        model = make(name)
        stock = step(model)
        with apply(model, strict=True):
            patched = step(model)
        again = step(model)
        assert off(patched.logits, stock.logits) < 1e-5
        assert patched.grads.keys() == stock.grads.keys()
        for parameter, grad in stock.grads.items():
            assert off(patched.grads[parameter], grad) < 1e-4, parameter
        assert torch.equal(again.logits, stock.logits)
        assert all(torch.equal(again.grads[p], g) for p, g in stock.grads.items())

    def test_inference(self, name, make, tokens):
        model = make(name).eval()
        with torch.no_grad():
            stock = model(tokens).logits
            with apply(model, strict=True):
                patched = model(tokens).logits
            again = model(tokens).logits
        assert off(patched, stock) < 1e-5
        assert torch.equal(again, stock)


@pytest.mark.parametrize("name", CONFIGS)
class TestBFloat16:
    """Rounded differently, so both are compared with the same model in float64 arithmetic of float32 weights."""

    def test_training_step(self, name, make, step):
        model = make(name, torch.bfloat16)
        stock = step(model)
        truth = step(make(name, torch.bfloat16).float())
        with apply(model, strict=True):
            patched = step(model)
        again = step(model)
        assert off(patched.logits, truth.logits) < 2 * off(stock.logits, truth.logits) + 1e-3
        together = [torch.cat([s.grads[p].flatten().double() for p in truth.grads]) for s in (patched, stock, truth)]
        assert off(together[0], together[2]) < 2 * off(together[1], together[2]) + 1e-3
        assert torch.equal(again.logits, stock.logits)

    def test_every_operator_runs(self, name, make, tokens):
        model = make(name, torch.bfloat16).eval()
        with torch.no_grad(), apply(model, strict=True) as handle:
            dispatch.reset_counters()
            model(tokens)
            report = handle.report()
        assert {row.site: row.modules for row in report if row.modules} == SITES[name]
        assert not [row for row in report if row.left]
        ran = {row["operator"] for row in dispatch.counters() if row["implementation"] == "reference"}
        for row in report:
            assert ran & set(row.operators), row.site


def test_router_logits_are_recorded(make, tokens):
    model = make("v4").eval()
    with torch.no_grad():
        stock = model(tokens, output_router_logits=True)
        with apply(model):
            patched = model(tokens, output_router_logits=True)
    assert len(patched.router_logits) == len(stock.router_logits) == 2
    for a, b in zip(patched.router_logits, stock.router_logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(patched.aux_loss, stock.aux_loss)


@pytest.mark.parametrize("name", ["v3", "v4"])
def test_generation_gives_the_same_tokens(name, make, tokens):
    model = make(name).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    stock = model.generate(tokens, **options)
    with apply(model):
        assert torch.equal(model.generate(tokens, **options), stock)


def test_autocast(make, step):
    model = make("v3")
    truth = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        stock = step(model)
        with apply(model):
            patched = step(model)
    assert patched.logits.dtype == stock.logits.dtype == torch.bfloat16
    assert off(patched.logits, truth.logits) < 2 * off(stock.logits, truth.logits)


class TestLeft:
    def test_float16_stays_with_transformers(self, make, tokens):
        model = make("v3", torch.float16).eval()
        with torch.no_grad():
            stock = model(tokens).logits
            with apply(model, ops=["swiglu", "experts", "rms-norm"]) as handle:
                assert torch.equal(model(tokens).logits, stock)
        reasons = {row.site: set(row.left) for row in handle.report() if row.left}
        assert reasons == {
            "experts": {"weights of torch.float16"},
            "swiglu": {"activations of torch.float16"},
            "rms-norm": {"activations of torch.float16"},
        }

    def test_streams_in_float32_stay_with_transformers(self, make, tokens):
        model = make("v4").eval()
        with torch.no_grad(), apply(model) as handle:
            model(tokens)
        (reason,) = next(row.left for row in handle.report() if row.site == "mhc-pre")
        assert "expected dtype bfloat16" in reason
        assert "6 calls left to transformers" in str(handle.report())

    def test_widths_that_the_operator_refuses(self, make, tokens):
        model = make("v3", intermediate_size=84).eval()
        with torch.no_grad():
            stock = model(tokens).logits
            with apply(model, ops=["swiglu"]) as handle:
                patched = model(tokens).logits
        torch.testing.assert_close(patched, stock)
        (row,) = [row for row in handle.report() if row.site == "swiglu"]
        assert list(row.left.values()) == [1]  # the dense layer; shared experts are 128 wide

    def test_switched_off_operator(self, make, tokens, monkeypatch):
        from tk_serving.config import settings

        model = make("v3").eval()
        with torch.no_grad():
            stock = model(tokens).logits
            with apply(model, ops=["swiglu"]) as handle:
                monkeypatch.setattr(settings, "disable", frozenset({"swiglu_forward"}))
                assert torch.equal(model(tokens).logits, stock)
        (reason,) = handle.report()[2].left
        assert "TK_SERVING_DISABLE" in reason
