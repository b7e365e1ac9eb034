"""sinkhorn_normalize and its gradient."""

import pytest
import torch
from mhc_inputs import f32

from tk_serving.mhc import mhc_sinkhorn_bwd, mhc_sinkhorn_fwd, sinkhorn_normalize
from tk_serving.operator import find


def test_h05_large_logits(implementation):
    out = find("sinkhorn_normalize").call(implementation, 200 * torch.eye(4)[None], 20, 1e-6)[0]
    assert out.isfinite().all()
    diagonal = torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(out[diagonal], torch.full((4,), 0.999996), rtol=1e-6, atol=0)
    torch.testing.assert_close(out[~diagonal], torch.full((12,), 9.99995e-7), rtol=1e-5, atol=0)
    torch.testing.assert_close(out.sum(-2), torch.full((4,), 0.999999), rtol=1e-6, atol=0)


def test_one_iteration_normalises_columns_once():
    x = f32(5, 4, 4)
    p = x.double().softmax(-1) + 1e-3
    expected = p / (p.sum(-2, keepdim=True) + 1e-3)
    torch.testing.assert_close(sinkhorn_normalize(x, 1, 1e-3).double(), expected, rtol=1e-5, atol=1e-7)


def test_many_iterations_are_doubly_stochastic():
    out = sinkhorn_normalize(f32(2, 3, 4, 4), 100)
    torch.testing.assert_close(out.sum(-1), torch.ones(2, 3, 4), rtol=1e-4, atol=0)
    torch.testing.assert_close(out.sum(-2), torch.ones(2, 3, 4), rtol=1e-4, atol=0)


def test_default_is_ten_iterations():
    x = f32(2, 4, 4)
    assert torch.equal(sinkhorn_normalize(x), sinkhorn_normalize(x, 10, 1e-6))
    assert not torch.equal(sinkhorn_normalize(x), sinkhorn_normalize(x, 20))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_entry_stays_in_its_matrix(value, implementation):
    x = f32(3, 4, 4)
    clean = find("sinkhorn_normalize").call(implementation, x, 5)
    x[1, 2, 3] = value
    out = find("sinkhorn_normalize").call(implementation, x, 5)
    assert out[1].isnan().any()
    assert torch.equal(out[::2], clean[::2])


def test_minus_infinity_excludes_an_entry(implementation):
    x = torch.zeros(1, 4, 4)
    x[0, 0, 1:] = -float("inf")
    out = find("sinkhorn_normalize").call(implementation, x, 20)[0]
    assert out.isfinite().all()
    assert out[0, 1:].max() < 1e-4


@pytest.mark.parametrize("repeat", [1, 2, 20])
def test_gradient(repeat):
    x, grad = f32(3, 4, 4), f32(3, 4, 4, seed=2)
    leaf = x.double().requires_grad_()
    p = leaf.softmax(-1) + 1e-6
    p = p / (p.sum(-2, keepdim=True) + 1e-6)
    for _ in range(repeat - 1):
        p = p / (p.sum(-1, keepdim=True) + 1e-6)
        p = p / (p.sum(-2, keepdim=True) + 1e-6)
    (expected,) = torch.autograd.grad(p, leaf, grad.double())
    torch.testing.assert_close(mhc_sinkhorn_bwd(grad, x, repeat).double(), expected, rtol=1e-4, atol=1e-6)


def test_more_iterations_than_the_kernel_keeps():
    refusal = find("mhc_sinkhorn_bwd").plan(f32(1, 4, 4), f32(1, 4, 4), 201, 1e-6, None).refusal
    assert refusal == "more than 200 iterations"


def test_caller_owned_output():
    x, out = f32(2, 4, 4), torch.empty(2, 4, 4)
    assert mhc_sinkhorn_fwd(x, 3, out=out) is out
    assert torch.equal(out, sinkhorn_normalize(x, 3))


@pytest.mark.parametrize(
    ("x", "repeat", "error", "message"),
    [
        (torch.zeros(2, 4, 4).double(), 10, TypeError, "x: expected dtype float32, got float64"),
        (torch.zeros(2, 4, 3), 10, ValueError, r"x: expected shape \[..., 4, 4\], got \[2, 4, 3\]"),
        (torch.zeros(2, 4, 4), 0, ValueError, "repeat: expected at least 1, got 0"),
    ],
)
def test_refused(x, repeat, error, message):
    with pytest.raises(error, match=f"sinkhorn_normalize: {message}"):
        sinkhorn_normalize(x, repeat)


def test_no_tokens():
    assert sinkhorn_normalize(torch.empty(0, 4, 4)).shape == (0, 4, 4)
