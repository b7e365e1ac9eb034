"""mhc_pre_apply_mix and its gradient."""

import pytest
import torch
from mhc_inputs import bf16, f32

from tk_serving.mhc import mhc_pre_apply_mix, mhc_pre_apply_mix_bwd


def test_weighted_sum():
    x = torch.arange(1.0, 5.0).view(1, 4, 1).expand(2, 4, 64).bfloat16().contiguous()
    mix = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1).expand(2, 4, 1).contiguous()
    assert mhc_pre_apply_mix(x, mix).eq(torch.tensor(4321.0).bfloat16()).all()


def test_products_are_not_rounded_before_they_are_added():
    """One rounding per step: with b = 1 + 2^-7 + 2^-23, b * b - b * b is 0 without contraction and not 0 with it."""
    x = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    mix = torch.zeros(1, 4, 1)
    factor = 1 + 2**-23
    value = torch.tensor(1 + 2**-7).bfloat16()
    mix[0, 0], x[0, 0] = -(factor * float(value)), 1.0  # rounded to float32 when stored
    mix[0, 1], x[0, 1] = factor, value
    exact = factor * float(value) + float(mix[0, 0])
    assert exact != 0
    assert mhc_pre_apply_mix(x, mix)[0, 0].double() == torch.tensor(exact).bfloat16().double()


def test_any_leading_sizes():
    x, mix = bf16(2, 3, 4, 64), f32(2, 3, 4, 1)
    flat = mhc_pre_apply_mix(x.view(6, 4, 64), mix.view(6, 4, 1))
    assert torch.equal(mhc_pre_apply_mix(x, mix), flat.view(2, 3, 64))
    assert torch.equal(mhc_pre_apply_mix(x[0, 0], mix[0, 0]), flat[0])


def test_infinite_and_nan():
    x, mix = torch.ones(1, 4, 64, dtype=torch.bfloat16), torch.ones(1, 4, 1)
    x[0, 0, 0], x[0, 1, 1], x[0, 2, 2] = float("inf"), float("nan"), 3e38
    mix[0, 2] = 2.0
    out = mhc_pre_apply_mix(x, mix)[0]
    assert out[0] == float("inf")
    assert out[1].isnan()
    assert out[2] == float("inf")
    assert out[3] == 5.0


def test_gradient():
    grad, x, mix = bf16(3, 64), bf16(3, 4, 64, seed=2), f32(3, 4, 1)
    x_grad, mix_grad = mhc_pre_apply_mix_bwd(grad, x, mix)
    assert torch.equal(x_grad, (mix * grad.float()[:, None]).bfloat16())
    exact = (grad.double()[:, None] * x.double()).sum(-1, keepdim=True)
    torch.testing.assert_close(mix_grad.double(), exact, rtol=1e-5, atol=1e-5)


def test_caller_owned_results():
    x, mix = bf16(2, 4, 64), f32(2, 4, 1)
    out = torch.empty(2, 64, dtype=torch.bfloat16)
    assert mhc_pre_apply_mix(x, mix, out=out) is out
    given = torch.empty_like(x), torch.empty_like(mix)
    results = mhc_pre_apply_mix_bwd(out, x, mix, x_grad=given[0], mix_grad=given[1])
    assert results[0] is given[0]
    assert results[1] is given[1]


def test_no_tokens():
    x, mix = bf16(0, 4, 64), f32(0, 4, 1)
    assert mhc_pre_apply_mix(x, mix).shape == (0, 64)
    x_grad, mix_grad = mhc_pre_apply_mix_bwd(bf16(0, 64), x, mix)
    assert (x_grad.shape, mix_grad.shape) == ((0, 4, 64), (0, 4, 1))


@pytest.mark.parametrize(
    ("mix", "error", "message"),
    [
        (torch.zeros(2, 4, 1).bfloat16(), TypeError, "mix: expected dtype float32, got bfloat16"),
        (torch.zeros(2, 4), ValueError, r"mix: expected shape \[2, 4, 1\], got \[2, 4\]"),
        (torch.zeros(3, 4, 1), ValueError, r"mix: expected shape \[2, 4, 1\], got \[3, 4, 1\]"),
    ],
)
def test_refused(mix, error, message):
    with pytest.raises(error, match=message):
        mhc_pre_apply_mix(bf16(2, 4, 64), mix)


def test_other_stream_counts_are_refused():
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 4, H\], got \[2, 3, 64\]"):
        mhc_pre_apply_mix(bf16(2, 3, 64), f32(2, 3, 1))
