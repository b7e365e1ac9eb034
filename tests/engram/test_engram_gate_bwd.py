"""engram_gate_bwd and its packed form: against float64 autograd, clamp, masks, partial sums, messages."""

import math

import pytest
import torch

from tk_serving import config
from tk_serving.engram import engram_gate_bwd, engram_gate_bwd_packed, engram_gate_fwd, fused_weight, grad_w_reduce

EPS = 1e-6


@pytest.fixture(autouse=True)
def _few_partial_sums():
    config.set_num_sms(3)
    yield
    config.set_num_sms(config.get_device_num_sms())


def random(tokens=7, streams=4, hidden=512, clamp=1e-6, mask=None, seed=0):
    """Inputs of the forward pass, its saved values, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, streams, hidden, generator=generator).bfloat16()
    kv = torch.randn(tokens, streams + 1, hidden, generator=generator).bfloat16()
    w = torch.randn(streams, hidden, generator=generator)
    inputs = (x, kv[:, :streams], kv[:, streams], w)
    _, *saved = engram_gate_fwd(*inputs, EPS, clamp, image_token_mask=mask)
    return torch.randn(tokens, streams, hidden, generator=generator).bfloat16(), inputs, saved


def float64_gradients(grad_out, inputs, clamp):
    """By automatic differentiation of the forward formula."""
    x, k, v, w = (t.double().requires_grad_() for t in inputs)
    norm_x, norm_k = (1 / (t.pow(2).mean(-1) + EPS).sqrt() for t in (x, k))
    z = torch.einsum("thd,hd,thd->th", x, w, k) * norm_x * norm_k / math.sqrt(x.shape[-1])
    gate = torch.sigmoid(z.sign() * z.abs().clamp(min=clamp).sqrt())
    output = x + gate[..., None] * v[:, None]
    return torch.autograd.grad(output, (x, k, v, w), grad_out.double())


@pytest.mark.parametrize("clamp", [1e-6, 0.5])
def test_against_float64_autograd(clamp):
    grad_out, inputs, saved = random(clamp=clamp)
    *gradients, partial = engram_gate_bwd(grad_out, *inputs, *saved, clamp)
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 3
    assert (partial.dtype, partial.shape) == (torch.float32, (3, 4, 512))
    *expected, expected_w = float64_gradients(grad_out, inputs, clamp)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2e-6)
    torch.testing.assert_close(partial.double().sum(0), expected_w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clamp", [1e-6, 0.9])
def test_references_against_numerical_derivatives(clamp):
    """gradcheck in float64 of the chain of all Engram references that are differentiated."""
    fused, forward, backward, reduce = (
        op.operator.reference for op in (fused_weight, engram_gate_fwd, engram_gate_bwd, grad_w_reduce)
    )

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k, v, weight_hidden, weight_embed):
            weight = fused(weight_hidden, weight_embed)
            output, *saved = forward(x, k, v, weight, EPS, clamp)
            ctx.save_for_backward(x, k, v, weight_hidden, weight_embed, weight, *saved)
            return output

        @staticmethod
        def backward(ctx, grad_out):
            x, k, v, weight_hidden, weight_embed, weight, *saved = ctx.saved_tensors
            *gradients, partial = backward(grad_out, x, k, v, weight, *saved, clamp)
            of_weights = torch.zeros_like(weight_hidden), torch.zeros_like(weight_embed)
            reduce(partial, weight_hidden, weight_embed, *of_weights)
            return *gradients, *of_weights

    generator = torch.Generator().manual_seed(0)
    shapes = (5, 2, 6), (5, 2, 6), (5, 6), (2, 6), (2, 6)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    _, dot, _, rstd_x, rstd_k = forward(*leaves[:3], fused(*leaves[3:]), EPS, clamp)
    active = (dot * rstd_x * rstd_k).abs() * 6**-0.5 < clamp
    assert bool(active.any()) == (clamp > 0.5)
    assert not active.all()
    assert torch.autograd.gradcheck(Gate.apply, leaves, eps=1e-6, atol=1e-6, rtol=1e-5)


def test_by_hand():
    """x = k = w = 1, v = 2, grad_out = 1, D = 256: dot 256, similarity 16, gate sigmoid(4), sum(grad_out v) 512."""
    one = torch.ones(1, 4, 256).bfloat16()
    inputs = (one, one, torch.full((1, 256), 2.0).bfloat16(), torch.ones(4, 256))
    _, *saved = engram_gate_fwd(*inputs, EPS, 1e-6)
    grad_x, grad_k, grad_v, partial = engram_gate_bwd(one, *inputs, *saved, 1e-6)
    gate = 1 / (1 + math.exp(-4))
    delta = 512 * gate * (1 - gate) / 2 * math.sqrt(1 / 16 / 256)
    assert grad_x.unique().tolist() == [1.0], "the pull of the norm cancels the push of the dot product"
    assert grad_k.abs().max() < 1e-6
    assert grad_v.unique().tolist() == [float(torch.tensor(4 * gate).bfloat16())]
    assert partial[0].flatten().tolist() == pytest.approx([delta] * 1024, rel=1e-5)
    assert partial[1:].abs().max() == 0


def test_active_clamp_stops_the_gradient():
    grad_out, inputs, saved = random(clamp=1e3)
    grad_x, grad_k, grad_v, partial = engram_gate_bwd(grad_out, *inputs, *saved, 1e3)
    assert torch.equal(grad_x, grad_out)
    assert not grad_k.any()
    assert not partial.any()
    gate = saved[1].double()
    torch.testing.assert_close(
        grad_v.double(), torch.einsum("thd,th->td", grad_out.double(), gate), rtol=2**-8, atol=1e-6
    )


def test_zero_dot_stops_the_gradient():
    grad_out, (x, k, v, w), _ = random()
    k = torch.zeros_like(k)
    _, *saved = engram_gate_fwd(x, k, v, w, EPS, 1e-6)
    grad_x, grad_k, _, partial = engram_gate_bwd(grad_out, x, k, v, w, *saved, 1e-6)
    assert torch.equal(grad_x, grad_out)
    assert not grad_k.any()
    assert not partial.any()


def test_image_rows():
    mask = torch.tensor([False, True, False, True, True, False, False])
    grad_out, inputs, saved = random(mask=mask)
    inputs[0][1] = torch.inf  # data of an image row reaches no gradient
    grad_x, grad_k, grad_v, partial = engram_gate_bwd(grad_out, *inputs, *saved, 1e-6, image_token_mask=mask)
    assert torch.equal(grad_x[mask], grad_out[mask])
    assert not grad_k[mask].any()
    assert not grad_v[mask].any()
    live = [t[~mask] for t in inputs[:3]]
    *expected, expected_w = float64_gradients(grad_out[~mask], (*live, inputs[3]), 1e-6)
    for got, want in zip((grad_x, grad_k, grad_v), expected, strict=True):
        torch.testing.assert_close(got[~mask].double(), want, rtol=2**-8, atol=2e-6)
    torch.testing.assert_close(partial.double().sum(0), expected_w, rtol=1e-4, atol=1e-5)


def test_more_partial_sums_than_tokens():
    grad_out, inputs, saved = random(tokens=2)
    config.set_num_sms(5)
    partial = engram_gate_bwd(grad_out, *inputs, *saved, 1e-6)[3]
    assert partial.shape == (5, 4, 512)
    assert partial[:2].any()
    assert not partial[2:].any()


def test_no_tokens():
    grad_out, inputs, saved = random(tokens=0)
    grad_x, grad_k, grad_v, partial = engram_gate_bwd(grad_out, *inputs, *saved, 1e-6)
    assert [g.shape for g in (grad_x, grad_k, grad_v)] == [(0, 4, 512), (0, 4, 512), (0, 512)]
    assert (partial.shape, bool(partial.any())) == ((3, 4, 512), False)


def test_packed():
    grad_out, (x, k, v, w), saved = random(streams=3)
    kv = torch.cat((k, v[:, None]), dim=1)
    grad_x, grad_kv, partial = engram_gate_bwd_packed(grad_out, x, kv, w, *saved, 1e-6)
    assert (grad_kv.shape, grad_kv.is_contiguous()) == (kv.shape, True)
    expected = float64_gradients(grad_out, (x, k, v, w), 1e-6)
    for got, want in zip((grad_x, grad_kv[:, :3], grad_kv[:, 3]), expected, strict=False):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2e-6)
    torch.testing.assert_close(partial.double().sum(0), expected[3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (0, torch.zeros(2, 4, 512).bfloat16(), ValueError, "grad_out: expected shape [7, 4, 512], got [2, 4, 512]"),
        (0, torch.zeros(7, 4, 512), TypeError, "grad_out: expected dtype bfloat16, got float32"),
        (5, torch.zeros(7, 4).bfloat16(), TypeError, "dot: expected dtype float32, got bfloat16"),
        (6, torch.zeros(7, 4, 1), ValueError, "gate_score: expected shape [7, 4], got [7, 4, 1]"),
        (9, 0.0, ValueError, "clamp_value: expected a positive number, got 0.0"),
    ],
)
def test_messages(position, value, error, message):
    grad_out, inputs, saved = random()
    arguments = [grad_out, *inputs, *saved, 1e-6]
    arguments[position] = value
    with pytest.raises(error) as raised:
        engram_gate_bwd(*arguments)
    assert str(raised.value) == f"engram_gate_bwd: {message}"


def test_packed_message():
    grad_out, (x, _, v, w), saved = random()
    with pytest.raises(
        ValueError, match=r"^engram_gate_bwd_packed: kv: expected shape \[T, h \+ 1, D\], got \[7, 512\]$"
    ):
        engram_gate_bwd_packed(grad_out, x, v, w, *saved, 1e-6)
