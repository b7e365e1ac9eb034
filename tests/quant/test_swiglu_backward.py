"""Gradients of SwiGLU: against autograd in float64, row treatment, limits, messages."""

import pytest
import torch

from tk_serving import compat21, config
from tk_serving.quant import (
    per_token_cast,
    swiglu_backward,
    swiglu_backward_and_per_token_cast,
    swiglu_forward,
    swiglu_forward_and_per_token_cast,
)


def codes(data):
    return data.view(torch.uint8)


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def differentiated(x, grad_out, weight, clamp):
    """(y, gradient of x, gradient of the weight of every row) in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    gate, up = x.chunk(2, dim=1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    y = torch.nn.functional.silu(gate) * up * weight[:, None]
    y.backward(grad_out.double())
    return y.detach(), x.grad, weight.grad


@pytest.fixture
def alignment():
    saved = config.get_token_alignment()
    yield config.set_token_alignment
    config.set_token_alignment(saved)


def quantised_call(npc, clamp=None, round_sf=False, hidden=256):
    """Arguments for 2 tokens of 2 experts in 5 rows; row 2 has no token."""
    x = per_token_cast(made(5, 2 * hidden) * 2, "e4m3", npc)
    grad_out = made(5, hidden, seed=1).bfloat16()
    weight = torch.tensor([[0.25, 1.5], [0.75, 0.5]])
    return x, grad_out, weight, i32(3, 0, -1, 2, 1), i32(1, 4, 3, 0).view(2, 2), npc, round_sf, clamp


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("npc", [32, 128])
def test_against_autograd(npc, clamp):
    args = quantised_call(npc, clamp)
    x, grad_out, weight, positions = args[:4]
    values = x[0].float() * x[1].repeat_interleave(npc, dim=1)
    weights = torch.where(positions >= 0, weight.flatten()[positions.clamp(min=0).long()], 0.0)
    y, gx, gw = differentiated(values, grad_out, weights, clamp)
    out, cast, x_grad, weight_grad = swiglu_backward_and_per_token_cast(*args)
    assert torch.allclose(out.double(), y, rtol=4e-3, atol=1e-6)
    assert torch.allclose(x_grad.double(), gx, rtol=5e-3, atol=1e-6)
    assert torch.allclose(weight_grad.double(), gw[[1, 4, 3, 0]].view(2, 2), rtol=1e-4, atol=1e-4)
    assert (out.dtype, x_grad.dtype, weight_grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert (cast[0].shape, cast[1].shape) == ((5, 512), (5, 512 // npc))
    again = cast[0].float() * cast[1].repeat_interleave(npc, dim=1)
    largest = gx.abs().unflatten(1, (-1, npc)).amax(dim=2).repeat_interleave(npc, dim=1)
    assert bool(((again - gx).abs() <= largest * 0.0625 + 1e-5).all())


def test_rows_without_a_token():
    x, *rest = quantised_call(128, round_sf=True)
    data = x[0].float()
    data[2] = float("nan")
    out, (codes_, sf), x_grad, weight_grad = swiglu_backward_and_per_token_cast((data.to(x[0].dtype), x[1]), *rest)
    assert not bool(out[2].any())
    assert not bool(x_grad[2].any())
    assert not bool(codes(codes_)[2].any())
    assert sf[2].unique().tolist() == [2.0**-22]
    assert not bool(weight_grad.isnan().any())


def test_slots_without_a_row():
    args = list(quantised_call(128))
    expected = swiglu_backward_and_per_token_cast(*args)[3]
    args[4] = i32(1, -1, 5, 0).view(2, 2)
    found = swiglu_backward_and_per_token_cast(*args)[3]
    assert found.flatten()[1:3].tolist() == [0.0, 0.0]
    assert torch.equal(found.flatten()[[0, 3]], expected.flatten()[[0, 3]])


def test_positions_past_the_weights_count_as_none():
    args = list(quantised_call(32))
    expected = swiglu_backward_and_per_token_cast(*args)
    args[3] = i32(3, 0, 4, 2, 1)
    found = swiglu_backward_and_per_token_cast(*args)
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found[0], expected[0])


def test_no_rows():
    x = torch.empty(0, 256, dtype=torch.float8_e4m3fn), torch.empty(0, 2)
    slots = torch.full((3, 2), -1, dtype=torch.int32)
    out, cast, x_grad, weight_grad = swiglu_backward_and_per_token_cast(
        x, torch.empty(0, 128, dtype=torch.bfloat16), torch.ones(3, 2), i32(), slots, 128
    )
    assert (out.shape, cast[0].shape, cast[1].shape, x_grad.shape) == ((0, 128), (0, 256), (0, 2), (0, 256))
    assert weight_grad.tolist() == [[0.0, 0.0]] * 3


def test_limits_stop_the_gradient_of_what_they_change():
    """The gate is limited from above only, the up half from both sides; at the limit itself the gradient passes."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([3.0, 2.0, -3.0, 1.0])
    x[0, 16:20] = torch.tensor([1.0, 2.0, 3.0, -3.0])
    gx = swiglu_backward(x, torch.ones(1, 16), clamp_value=2.0)[0]
    assert (gx[0, :4] != 0).tolist() == [False, True, True, True]
    assert (gx[0, 16:20] != 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("clamp", [None, 1.0])
def test_plain_gradients(clamp, alignment):
    alignment(1)
    x, grad_out, weights = made(5, 144) * 2, made(5, 72, seed=1), torch.tensor([0.5, 1.5, 0.25, 1.0, 2.0])
    _, gx, gw = differentiated(x, grad_out, weights * 2.5, clamp)
    found = swiglu_backward(x, grad_out, None, weights, 2.5, clamp, True)
    assert torch.allclose(found[0].double(), gx, rtol=1e-4, atol=1e-5)
    assert torch.allclose(found[1].double(), gw * 2.5, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[2], swiglu_forward(x, "fp32", None, weights, 2.5, clamp))
    padded = swiglu_backward(x, grad_out, i32(2, 3), weights, 2.5, clamp, True)
    for result, whole in zip(padded, found, strict=True):
        assert torch.equal(result[:3], whole[:3])
        assert not bool(result[3:].any())
    bare = swiglu_backward(x, grad_out)
    assert bare[1:] == (None, None)


def test_grouped_forms(alignment):
    alignment(1)
    x, grad_out, weights = made(5, 256).bfloat16(), made(5, 128, seed=1).bfloat16(), torch.rand(5)
    psum = i32(2, 4)
    data, sf = compat21.swiglu_forward_and_per_token_cast(x, "e4m3", 32, psum, weights, 1.5, True, True)
    y = swiglu_forward(x, "fp32", psum, weights, 1.5)
    expected = per_token_cast(y, "e4m3", 32, None, True, True)
    assert torch.equal(codes(data), codes(expected[0]))
    assert torch.equal(sf[:4], expected[1][:4])
    assert not bool(sf[4].any())
    assert sf.stride() == (1, 8)
    unweighted = compat21.swiglu_forward_and_per_token_cast(x, "e4m3", 128)
    assert torch.equal(codes(unweighted[0]), codes(swiglu_forward_and_per_token_cast(x, "e4m3", 128)[0]))
    wide = x.float()
    cast, weight_grad, out = compat21.swiglu_backward_and_per_token_cast(
        wide, grad_out, "e4m3", 32, psum, weights, 1.5, True, None, True
    )
    plain = swiglu_backward(wide, grad_out, psum, weights, 1.5, None, True)
    expected = per_token_cast(plain[0], "e4m3", 32, None, False, True)
    assert torch.equal(codes(cast[0]), codes(expected[0]))
    assert torch.equal(cast[1][:4], expected[1][:4])
    assert not bool(cast[1][4].any())
    assert torch.equal(weight_grad, plain[1])
    assert torch.equal(out, plain[2])


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (ValueError, {5: 64}, "num_per_channels: expected 32 or 128, got 64"),
        (TypeError, {1: torch.ones(5, 256)}, "grad_out: expected dtype bfloat16, got float32"),
        (ValueError, {4: torch.zeros(3, 2, dtype=torch.int32)}, "token_topk_to_pos: expected shape"),
        (ValueError, {7: 0.0}, "swiglu_clamp_value: expected a positive number, got 0.0"),
        (TypeError, {0: torch.ones(5, 512)}, "x: expected a (data, sf) pair"),
    ],
)
def test_messages(error, change, message):
    args = list(quantised_call(128))
    for index, value in change.items():
        args[index] = value
    with pytest.raises(error) as caught:
        swiglu_backward_and_per_token_cast(*args)
    assert message in str(caught.value)
