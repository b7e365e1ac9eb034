"""A V4 training step through the generated CUDA of every operator, on the CPU."""

import torch
from test_outputs import off

from tk_serving import dispatch
from tk_serving.config import settings
from tk_serving_patches import apply


def test_training_step(make, monkeypatch):
    model = make("v4", torch.bfloat16)
    tokens = torch.arange(12)[None] * 7

    def step():
        out = model(input_ids=tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return out.logits.detach(), grads

    with apply(model, strict=True):
        references = step()
        monkeypatch.setattr(settings, "cpu", "simulator")
        dispatch.reset_counters()
        simulated = step()
    assert {row["implementation"] for row in dispatch.counters()} == {"simulator"}
    assert off(simulated[0], references[0]) < 1e-3
    together = [torch.cat([grads[name].flatten() for name in references[1]]) for _, grads in (simulated, references)]
    assert off(*together) < 2e-2  # a last bit in float32 can turn a rounding to bfloat16
