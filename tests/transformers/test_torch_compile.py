"""Patched models under torch.compile."""

import pytest
import torch
from test_outputs import off
from torch._dynamo.testing import CompileCounter

from tk_serving import dispatch
from tk_serving_patches import apply


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "dtype"), [("v2-groups", torch.float32), ("v3", torch.float32), ("v4", torch.bfloat16)]
)
def test_inference(name, dtype, make, tokens):
    model = make(name, dtype).eval()
    with torch.no_grad(), apply(model, strict=True):
        eager = model(tokens, use_cache=False).logits
        dispatch.reset_counters()
        compiled = torch.compile(model, backend="eager")(tokens, use_cache=False).logits
    assert off(compiled, eager) < (1e-5 if dtype == torch.float32 else 0.15)
    assert {"swiglu_forward", "reduce_fused", "norm_forward"} <= {row["operator"] for row in dispatch.counters()}


def test_training(make, step):
    model = make("v3", torch.bfloat16)
    with apply(model, strict=True):
        eager = step(model)
        compiled = step(torch.compile(model, backend="aot_eager"))
    assert off(compiled.logits, eager.logits) < 1e-2
    for parameter, grad in eager.grads.items():
        assert off(compiled.grads[f"_orig_mod.{parameter}"], grad) < 2e-2, parameter


def test_layer_is_one_graph(make):
    layer = make("v3").eval().model.layers[1].mlp
    x = torch.randn(1, 5, 64)
    with torch.no_grad(), apply(layer, strict=True):
        eager = layer(x)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager)


def test_revert_reaches_compiled_code(make):
    layer = make("v3").eval().model.layers[0].mlp
    x = torch.randn(1, 5, 64)
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter)
    with torch.no_grad():
        stock = compiled(x)
        with apply(layer, strict=True):
            dispatch.reset_counters()
            compiled(x)
            assert [row["operator"] for row in dispatch.counters()] == ["swiglu_forward"]
            dispatch.reset_counters()
        assert torch.equal(compiled(x), stock)
        assert not dispatch.counters()
    assert counter.frame_count >= 2
