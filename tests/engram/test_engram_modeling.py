"""modeling.engram and compat21: autograd, main_grad, leading dimensions, packed buffers."""

import math

import pytest
import torch

from tk_serving import compat21
from tk_serving.engram import engram_gate_bwd, engram_gate_fwd, fused_weight
from tk_serving.modeling.engram import EngramGate, engram_gate

CLAMP, EPS = 1e-6, 1e-5


def parameters(*leading, streams=4, hidden=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (*leading, streams, hidden),
        (*leading, streams, hidden),
        (*leading, hidden),
        (streams, hidden),
        (streams, hidden),
    ]
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def formula(x, k, v, weight_hidden, weight_embed):
    x, k, v, w = x.double(), k.double(), v.double(), weight_hidden.double() * weight_embed.double()
    norm_x, norm_k = (1 / (t.pow(2).mean(-1) + EPS).sqrt() for t in (x, k))
    z = (x * w * k).sum(-1) * norm_x * norm_k / math.sqrt(x.shape[-1])
    return x + torch.sigmoid(z.sign() * z.abs().clamp(min=CLAMP).sqrt())[..., None] * v[..., None, :]


@pytest.mark.parametrize("leading", [(6,), (2, 3), (0,)])
def test_gradients(leading):
    tensors = parameters(*leading)
    output = engram_gate(*tensors, CLAMP, EPS)
    assert (output.dtype, output.shape) == (torch.bfloat16, tensors[0].shape)
    torch.testing.assert_close(output.double(), formula(*tensors), rtol=2**-8, atol=1e-6)
    direction = torch.randn(output.shape).bfloat16()
    gradients = torch.autograd.grad(output, tensors, direction)
    expected = torch.autograd.grad(formula(*tensors), tensors, direction.double())
    for got, want in zip(gradients, expected, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want.double(), rtol=2**-7, atol=1e-4)


def test_main_grad_is_added_to():
    tensors = parameters(6)
    weight_hidden, weight_embed = tensors[3:]
    weight_hidden.main_grad = torch.full((4, 256), 5.0)
    weight_embed.main_grad = torch.full((4, 256), 7.0, dtype=torch.float64)
    expected = torch.autograd.grad(formula(*tensors).sum(), tensors[3:])
    engram_gate(*tensors, CLAMP, EPS).sum().backward()
    assert weight_hidden.grad is None
    assert weight_embed.grad is None
    torch.testing.assert_close(weight_hidden.main_grad - 5, expected[0].float(), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close((weight_embed.main_grad - 7).float(), expected[1].float(), rtol=2**-7, atol=1e-3)


def test_only_what_requires_a_gradient_gets_one():
    x, k, v, weight_hidden, weight_embed = parameters(3)
    engram_gate(x, k.detach(), v.detach(), weight_hidden.detach(), weight_embed, CLAMP, EPS).sum().backward()
    assert x.grad is not None
    assert weight_embed.grad is not None
    x.grad = None
    engram_gate(x, k.detach(), v.detach(), weight_hidden.detach(), weight_embed.detach(), CLAMP, EPS).sum().backward()
    assert x.grad is not None


def test_nothing_is_saved_without_gradients():
    tensors = parameters(3)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            quiet = engram_gate(*tensors, CLAMP, EPS)
        assert not saved
        assert torch.equal(quiet, engram_gate(*tensors, CLAMP, EPS))
        assert saved
    assert not quiet.requires_grad


def test_views_of_one_buffer():
    x, k, v, *weights = parameters(2, 3)
    kv = torch.cat((k, v[..., None, :]), dim=-2).detach().requires_grad_()
    engram_gate(x, kv[..., :-1, :], kv[..., -1, :], *weights, CLAMP, EPS).sum().backward()
    expected = torch.autograd.grad(formula(x, k, v, *weights).sum(), (k, v))
    torch.testing.assert_close(kv.grad[..., :-1, :], expected[0], rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(kv.grad[..., -1, :], expected[1], rtol=2**-7, atol=1e-4)


def test_module():
    gate = EngramGate(4, 256, clamp_value=CLAMP, eps=EPS)
    assert [name for name, _ in gate.named_parameters()] == ["weight_hidden", "weight_embed"]
    x, k, v, *_ = parameters(5)
    expected = formula(x, k, v, gate.weight_hidden, gate.weight_embed)
    torch.testing.assert_close(gate(x, k, v).double(), expected, rtol=2**-8, atol=1e-6)
    assert repr(gate) == "EngramGate(4, 256, clamp_value=1e-06, eps=1e-05)"


def test_compat21_packs_keys_and_value():
    x, k, v, *weights = (t.detach() for t in parameters(5))
    w, kv = fused_weight(*weights), torch.cat((k, v[:, None]), dim=1)
    mask = torch.tensor([False, True, False, False, True])
    output, *saved = compat21.engram_gate_fwd(x, kv, w, EPS, CLAMP, True, mask)
    expected = engram_gate_fwd(x, k, v, w, EPS, CLAMP, image_token_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip((output, *saved), expected, strict=True))
    direction = torch.randn(x.shape).bfloat16()
    grad_x, grad_kv, partial = compat21.engram_gate_bwd(direction, x, kv, w, *saved, CLAMP, mask)
    separate = engram_gate_bwd(direction, x, k, v, w, *saved, CLAMP, image_token_mask=mask)
    for got, want in zip((grad_x, grad_kv[:, :4], grad_kv[:, 4], partial), separate, strict=True):
        assert torch.equal(got, want)
    written = compat21.engram_gate_fwd(x, kv, w, EPS, CLAMP, False, mask, True)
    assert written[0] is x
    assert torch.equal(x, output)


def test_compat21_messages():
    x, kv, w = torch.zeros(2, 4, 256).bfloat16(), torch.zeros(2, 5, 256).bfloat16(), torch.zeros(4, 256)
    with pytest.raises(ValueError, match=r"^engram_gate_fwd: kv: expected shape \[T, h \+ 1, D\], got \[2, 256\]$"):
        compat21.engram_gate_fwd(x, kv[:, 0], w, EPS, CLAMP)
    with pytest.raises(TypeError, match=r"^engram_gate_fwd: kv: expected a torch.Tensor, got NoneType$"):
        compat21.engram_gate_fwd(x, None, w, EPS, CLAMP)
