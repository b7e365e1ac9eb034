"""FP4 experts multiplied as they are behind SGLang's Marlin method: preparation at load, numbers, reasons.

SGLang's own class on CPU tensors; the repacking for Marlin, which needs a GPU, has a stand-in.
"""

import functools
import importlib
from types import SimpleNamespace

import fp4_layers
import pytest
import torch
from fp4_layers import EXPERTS, LIMIT, TOPK, close, expected

from tk_serving import dispatch
from tk_serving.config import settings
from tk_serving.modeling.fp8_experts import w4a8

pytest.importorskip("sglang.srt")

from tk_serving_patches.fp4_experts import operators_refusal
from tk_serving_sglang.sites import fp4_experts

HIDDEN = 256
inputs = functools.partial(fp4_layers.inputs, HIDDEN)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    dispatch.reset_counters()
    operators_refusal.cache_clear()
    monkeypatch.setattr(settings, "experts", "w4a8")
    # What SGLang imports with it would keep the stand-in below.
    importlib.import_module("sglang.srt.layers.quantization.mxfp4_marlin_moe")
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(moe=SimpleNamespace(enable_eplb=False))
    )
    yield
    dispatch.reset_counters()


def repacked(seed=0, exponent=None):
    """A layer as SGLang leaves it after repacking for Marlin, and its weights as float32."""
    layer = SimpleNamespace(top_k=TOPK, num_experts=EXPERTS, _dsv4_mxfp4_backend="marlin")
    return fp4_layers.fill(layer, HIDDEN, seed, exponent)


def method(**differences):
    """An instance of SGLang's class, and what its runner is told."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.quantization.mxfp4_marlin_moe import Mxfp4MarlinMoEMethod

    made = Mxfp4MarlinMoEMethod(None, "")
    made.hidden_pad = differences.pop("hidden_pad", 0)
    lora = differences.pop("lora_enabled", False)
    config = MoeRunnerConfig(**{"activation": "silu", "swiglu_limit": LIMIT, **differences})
    made.runner = SimpleNamespace(config=config, lora_enabled=lora)
    return made


def loaded(made, layer):
    fp4_experts._process_weights_after_loading(lambda self, layer: None)(made, layer)
    return layer


def run(made, layer, x, ids, weights):
    """The patched ``apply``; SGLang's answers "stock"."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    dispatched = SimpleNamespace(hidden_states=x, topk_output=StandardTopKOutput(weights, ids, None))
    found = fp4_experts._apply(lambda self, layer, dispatched: "stock")(made, layer, dispatched)
    return found if found == "stock" else found.hidden_states


def reasons():
    rows = [row for row in dispatch.counters() if row["implementation"] == "engine"]
    assert {row["operator"] for row in rows} in (set(), set(w4a8.OPERATORS))
    return {row["reason"] for row in rows}


@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_every_step_runs_on_weights_in_place_of_marlins(tokens):
    layer, values = repacked()
    made = method()
    loaded(made, layer)
    assert layer.w13_weight_scale.dtype == torch.float32
    x, ids, weights = inputs(tokens)
    ids[0, 1] = -1  # an expert of another rank
    assert close(run(made, layer, x, ids, weights), expected(values, x, ids, weights))
    assert reasons() == set()


def test_the_result_goes_where_sglang_wants_it():
    from sglang.srt.layers import zero_copy_context

    layer, values = repacked()
    made = method()
    loaded(made, layer)
    x, ids, weights = inputs()
    out = torch.zeros_like(x)
    with zero_copy_context.set_moe_output(out):
        assert run(made, layer, x, ids, weights) is out
    assert close(out, expected(values, x, ids, weights))


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        ({"gemm1_alpha": 1.7}, "activation silu with an alpha"),
        ({"activation": "relu2", "is_gated": False}, "activation relu2"),
        ({"no_combine": True}, "results of experts that are not added up, or weights on the input"),
        ({"hidden_pad": 128}, "a padded hidden size"),
        ({"lora_enabled": True}, "LoRA"),
    ],
)
def test_layers_that_stay_with_marlin_say_why_and_keep_its_weights(differences, reason):
    layer, _ = repacked()
    kept = layer.w13_weight.data.clone()
    made = method(**differences)
    loaded(made, layer)
    assert torch.equal(layer.w13_weight, kept)
    assert run(made, layer, *inputs()) == "stock"
    assert reasons() == {reason}


def test_biases_wide_scales_eplb_and_other_modes_stay_with_marlin(monkeypatch):
    def state(layer):
        return loaded(method(), layer)._tk_serving_fp4

    biased, _ = repacked()
    biased.w2_weight_bias = torch.zeros(EXPERTS, HIDDEN)
    assert state(biased) == "experts with a bias"
    assert state(repacked(exponent=119 - 27)[0]) == "scales of a row span more than 26 powers of two"
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(moe=SimpleNamespace(enable_eplb=True))
    )
    assert state(repacked()[0]) == "SGLang moves experts between ranks (EPLB)"
    monkeypatch.setattr(settings, "experts", "stock")
    assert state(repacked()[0]) == "TK_SERVING_EXPERTS=stock"


def test_layers_that_another_kernel_runs_are_left_alone():
    layer, _ = repacked()
    layer._dsv4_mxfp4_backend = None
    loaded(method(), layer)
    assert not hasattr(layer, "_tk_serving_fp4")


def test_site_is_for_hopper_only():
    assert fp4_experts.SITES[0].unsuitable() == "for cuda; this platform is cpu"
