"""The gates: mhc_pre_split_mixes, mhc_head_compute_mix and their gradients."""

import pytest
import torch
from mhc_inputs import f32

from tk_serving.mhc import (
    mhc_head_compute_mix,
    mhc_head_compute_mix_bwd,
    mhc_pre_split_mixes,
    mhc_pre_split_mixes_bwd,
    mhc_pre_split_mixes_fwd,
)


def test_columns_scales_and_order():
    mixes = torch.arange(24.0).expand(2, 3, 24).contiguous() / 8
    scale, base = torch.tensor([1.0, 2.0, 3.0]), torch.arange(24.0) / 100
    pre, post, comb = mhc_pre_split_mixes(mixes, scale, base, 4, 2.0, 0.5)
    assert (pre.shape, post.shape, comb.shape) == ((2, 3, 4, 1), (2, 3, 4, 1), (2, 3, 4, 4))
    z = mixes[0, 0].double() * torch.tensor([1.0] * 4 + [2.0] * 4 + [3.0] * 16) + base.double()
    torch.testing.assert_close(pre[1, 2, :, 0].double(), z[:4].sigmoid() + 0.5, rtol=1e-6, atol=0)
    torch.testing.assert_close(post[1, 2, :, 0].double(), z[4:8].sigmoid() * 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(comb[1, 2].double(), z[8:].view(4, 4), rtol=1e-6, atol=0)


def test_gates_at_their_ends():
    mixes = torch.zeros(3, 24)
    mixes[0, :8], mixes[1, :8] = 200.0, -200.0
    pre, post, _ = mhc_pre_split_mixes(mixes, torch.ones(3), torch.zeros(24), 4, 2.0, 1e-6)
    assert pre[:, 0, 0].tolist() == pytest.approx([1.000001, 1e-6, 0.500001])
    assert post[:, 0, 0].tolist() == [2.0, 0.0, 1.0]


def plain(mixes, scale, base, post_mult):
    z = mixes * torch.cat([scale[0].expand(4), scale[1].expand(4), scale[2].expand(16)]) + base
    return z[..., :4].sigmoid() + 1e-6, z[..., 4:8].sigmoid() * post_mult, z[..., 8:]


def test_gradient():
    mixes, scale, base = f32(70, 24), f32(3, seed=2), f32(24, seed=3)
    grads = f32(70, 4, 1, seed=4), f32(70, 4, 1, seed=5), f32(70, 4, 4, seed=6)
    leaves = [t.double().requires_grad_() for t in (mixes, scale, base)]
    wide = [g.double().flatten(1) for g in grads]
    expected = torch.autograd.grad(plain(*leaves, 2.0), leaves, wide)
    for got, want in zip(mhc_pre_split_mixes_bwd(*grads, mixes, scale, base, 2.0), expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_caller_owned_results():
    mixes, scale, base = f32(2, 24), f32(3, seed=2), f32(24, seed=3)
    given = torch.empty(2, 4, 1), torch.empty(2, 4, 1), torch.empty(2, 4, 4)
    results = mhc_pre_split_mixes_fwd(mixes, scale, base, 4, 2.0, 1e-6, pre=given[0], post=given[1], comb=given[2])
    assert all(a is b for a, b in zip(results, given, strict=True))
    expected = mhc_pre_split_mixes(mixes, scale, base, 4, 2.0, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    only = mhc_pre_split_mixes_fwd(mixes, scale, base, 4, 2.0, 1e-6, comb=given[2])
    assert only[2] is given[2]
    assert torch.equal(only[0], expected[0])


def test_head():
    mix = torch.tensor([[0.0, 1.0, -1.0, 100.0]])
    out = mhc_head_compute_mix(mix, torch.tensor([2.0]), torch.tensor([0.0, 0.0, 1.0, 0.0]), 1e-6)
    expected = torch.tensor([0.5, 2.0, -1.0, 200.0]).double()
    expected[1:] = torch.tensor([2.0, -1.0, 200.0]).double().sigmoid()
    torch.testing.assert_close(out[0].double(), expected + 1e-6, rtol=1e-6, atol=0)


def test_head_gradient():
    mix, scale, base, grad = f32(2, 5, 4), f32(1, seed=2), f32(4, seed=3), f32(2, 5, 4, seed=4)
    leaves = [t.double().requires_grad_() for t in (mix, scale, base)]
    expected = torch.autograd.grad((leaves[0] * leaves[1] + leaves[2]).sigmoid(), leaves, grad.double())
    for got, want in zip(mhc_head_compute_mix_bwd(grad, mix, scale, base), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


def test_no_tokens():
    pre, post, comb = mhc_pre_split_mixes(torch.empty(0, 24), torch.ones(3), torch.ones(24), 4, 2.0, 1e-6)
    assert (pre.shape, post.shape, comb.shape) == ((0, 4, 1), (0, 4, 1), (0, 4, 4))
    empty = torch.empty(0, 4, 1), torch.empty(0, 4, 1), torch.empty(0, 4, 4), torch.empty(0, 24)
    _, scale, base = mhc_pre_split_mixes_bwd(*empty, torch.ones(3), torch.ones(24), 2.0)
    assert scale.tolist() == [0.0] * 3  # sums over no tokens are written
    assert base.tolist() == [0.0] * 24


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_mixes": torch.zeros(2, 20)}, ValueError, r"input_mixes: expected shape \[..., 24\], got \[2, 20\]"),
        ({"mhc_scale": torch.zeros(1)}, ValueError, r"mhc_scale: expected shape \[3\], got \[1\]"),
        ({"mhc_base": torch.zeros(24).bfloat16()}, TypeError, "mhc_base: expected dtype float32, got bfloat16"),
        ({"mhc_mult": 2}, ValueError, "mhc_mult: expected 4, got 2"),
        ({"mhc_pre_eps": "x"}, TypeError, "mhc_pre_eps: expected float, got str"),
    ],
)
def test_refused(change, error, message):
    arguments = {
        "input_mixes": torch.zeros(2, 24),
        "mhc_scale": torch.zeros(3),
        "mhc_base": torch.zeros(24),
        "mhc_mult": 4,
        "mhc_post_mult_value": 2.0,
        "mhc_pre_eps": 1e-6,
    }
    with pytest.raises(error, match=f"mhc_pre_split_mixes: {message}"):
        mhc_pre_split_mixes(**arguments | change)


def test_head_refuses_the_shapes_of_a_sublayer():
    with pytest.raises(ValueError, match=r"mhc_head_compute_mix: mhc_scale: expected shape \[1\], got \[3\]"):
        mhc_head_compute_mix(torch.zeros(2, 4), torch.zeros(3), torch.zeros(4), 1e-6)
