"""Fine-tuning patched models: LoRA, gradient checkpointing, and several steps."""

import pytest
import torch
from test_outputs import off

from tk_serving_patches import apply


@pytest.mark.parametrize("name", ["v3", "v4"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(name, reentrant, make, step):
    model = make(name, torch.bfloat16).train()
    model.enable_input_require_grads()
    with apply(model, strict=True):
        plain = step(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        checkpointed = step(model)
    assert torch.equal(checkpointed.logits, plain.logits)
    assert plain.grads.keys() == checkpointed.grads.keys()
    for parameter, grad in plain.grads.items():
        torch.testing.assert_close(checkpointed.grads[parameter], grad, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("name", ["v3", "v4"])
@pytest.mark.parametrize("apply_first", [True, False])
def test_lora(name, apply_first, make, step):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=4,
        target_modules=["gate_proj", "up_proj", "down_proj", "q_b_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )

    def adapted(model):
        torch.manual_seed(2)
        return peft.get_peft_model(model, adapters)

    stock = step(adapted(make(name)))
    model = make(name)
    handle = apply(model, strict=True) if apply_first else None
    model = adapted(model)
    handle = handle or apply(model, strict=True)
    patched = step(model)
    assert not [row for row in handle.report() if row.left and not row.site.startswith("mhc")]
    assert all("lora" in parameter for parameter in patched.grads)
    assert patched.grads.keys() == stock.grads.keys()
    assert off(patched.logits, stock.logits) < 1e-5
    for parameter, grad in stock.grads.items():
        assert off(patched.grads[parameter], grad) < 1e-4, parameter
    handle.revert()
    assert torch.equal(step(model).logits, stock.logits)


@pytest.mark.parametrize("name", ["v2", "v3", "v4"])
def test_several_steps(name, make, tokens):
    def train(patch):
        model = make(name).train()
        handle = apply(model, strict=True) if patch else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(5):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if handle:
            handle.revert()
        return losses

    stock = train(patch=False)
    assert train(patch=True) == pytest.approx(stock, rel=5e-3)  # Adam magnifies the last bits
    assert stock[-1] < stock[0]


def test_without_a_backward_the_original_runs(make, step, tokens, monkeypatch):
    from tk_serving.config import settings

    model = make("v3")
    stock = step(model)
    with apply(model, ops=["swiglu"]) as handle:
        monkeypatch.setattr(settings, "disable", frozenset({"swiglu_backward"}))
        patched = step(model)
        with torch.no_grad():
            model(tokens)
        (left,) = [row.left for row in handle.report() if row.left]
    assert left == {"switched off by TK_SERVING_DISABLE": 2}  # both MLPs, while training alone
    assert torch.equal(patched.logits, stock.logits)


def test_frozen_inputs_need_no_gradient(make, tokens):
    """Only the head is trained: nothing before it records a graph."""
    model = make("v3").train().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with apply(model, strict=True):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert model.lm_head.weight.grad is not None
