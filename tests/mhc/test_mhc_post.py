"""mhc_post and its gradient, with the faults that others have reported."""

import pytest
import torch
from mhc_inputs import bf16, f32

from tk_serving.mhc import mhc_post, mhc_post_bwd, mhc_post_fwd
from tk_serving.operator import find


def inputs(tokens, hidden=64):
    return bf16(tokens, hidden), bf16(tokens, 4, hidden, seed=2), f32(tokens, 4, 1), f32(tokens, 4, 4, seed=3)


def test_h01_the_matrix_is_contracted_over_its_first_axis(implementation):
    residual = torch.arange(1.0, 5.0).view(1, 4, 1).expand(1, 4, 1280).bfloat16().contiguous()
    comb = torch.zeros(1, 4, 4)
    for j in range(4):
        comb[0, j, (j + 1) % 4] = 1.0
    args = torch.zeros(1, 1280).bfloat16(), residual, torch.zeros(1, 4, 1), comb
    out = find("mhc_post").call(implementation, *args)
    assert out[0, :, 0].tolist() == [4, 1, 2, 3]
    assert out.eq(out[..., :1]).all()


def test_h03_mix_in_bfloat16():
    x, residual, post, comb = inputs(2)
    with pytest.raises(TypeError, match="mhc_post: post_layer_mix: expected dtype float32, got bfloat16"):
        mhc_post(x, residual, post.bfloat16(), comb)


def test_h06_broadcast_residual(implementation):
    x = bf16(1, 3, 1, 1280).expand(1, 3, 4, 1280)
    assert x.stride(-2) == 0
    comb, post = torch.eye(4).expand(1, 3, 4, 4).contiguous(), torch.zeros(1, 3, 4, 1)
    out = find("mhc_post").call(implementation, bf16(1, 3, 1280, seed=5), x, post, comb)
    assert torch.equal(out, x)


@pytest.mark.parametrize("tokens", [1, 3, 5, 7, 9, 127])
def test_h07_any_token_count(tokens):
    """Rows have the same bits as in a batch of 128, forward and backward."""
    whole, grad = inputs(128), bf16(128, 4, 64, seed=4)
    part = [t[:tokens] for t in whole]
    forward, backward = find("mhc_post"), find("mhc_post_bwd")
    assert torch.equal(forward.call("simulator", *part), forward.call("simulator", *whole)[:tokens])
    results = backward.call("simulator", *part, grad[:tokens])
    expected = backward.call("simulator", *whole, grad)
    assert all(torch.equal(a, b[:tokens]) for a, b in zip(results, expected, strict=True))


def test_values():
    x, residual, post, comb = inputs(3)
    exact = post.double() * x.double()[:, None] + torch.einsum("tio,tih->toh", comb.double(), residual.double())
    torch.testing.assert_close(mhc_post(x, residual, post, comb).double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("layout", ["transposed", "row-strided", "any"])
def test_residual_of_any_strides(layout):
    x, residual, post, comb = inputs(3)
    expected = mhc_post(x, residual, post, comb)
    if layout == "transposed":
        strided = residual.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "row-strided":
        strided = torch.cat([residual, residual], dim=-1)[..., :64]
    else:
        strided = residual.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    assert torch.equal(mhc_post(x, strided, post, comb), expected)


def test_output_may_not_share_memory_with_residual():
    x, residual, post, comb = inputs(2)
    with pytest.raises(ValueError, match="out: expected memory apart from residual, got overlapping memory"):
        mhc_post(x, residual, post, comb, out=residual)


def test_gradient():
    x, residual, post, comb = inputs(3)
    grad = bf16(3, 4, 64, seed=4)
    leaves = [t.double().requires_grad_() for t in (x, residual, post, comb)]
    out = leaves[2] * leaves[0][:, None] + torch.einsum("tio,tih->toh", leaves[3], leaves[1])
    expected = torch.autograd.grad(out, leaves, grad.double())
    for got, want in zip(mhc_post_bwd(x, residual, post, comb, grad), expected, strict=True):
        tolerance = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-4)


def test_fuse_grad_acc_has_no_effect():
    args, grad = inputs(2), bf16(2, 4, 64, seed=4)
    first, second = mhc_post_bwd(*args, grad), mhc_post_bwd(*args, grad, False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_tokens():
    args = inputs(0)
    assert mhc_post(*args).shape == (0, 4, 64)
    shapes = [tuple(t.shape) for t in mhc_post_bwd(*args, bf16(0, 4, 64))]
    assert shapes == [(0, 64), (0, 4, 64), (0, 4, 1), (0, 4, 4)]


def test_the_operator_itself_records_nothing():
    x, residual, post, comb = inputs(2)
    post.requires_grad_()
    with torch.no_grad():
        assert not mhc_post_fwd(x, residual, post, comb).requires_grad
    assert mhc_post(x, residual, post, comb).requires_grad


def test_traced_with_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, residual = torch.empty(2, 64, dtype=torch.bfloat16), torch.empty(2, 4, 64, dtype=torch.bfloat16)
        out = mhc_post(x, residual, torch.empty(2, 4, 1), torch.empty(2, 4, 4))
        given = mhc_post(x, residual, torch.empty(2, 4, 1), torch.empty(2, 4, 4), torch.empty_like(residual))
    assert out.shape == given.shape == (2, 4, 64)
