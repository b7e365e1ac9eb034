"""expand_to_mhc and its gradient: copies, sums, ownership, messages."""

import pytest
import torch

from tk_serving.mhc import expand_to_mhc, expand_to_mhc_bwd, expand_to_mhc_fwd


@pytest.mark.parametrize("mult", [1, 3, 4])
def test_every_stream_is_the_hidden_state(mult):
    x = torch.arange(2 * 3 * 64).view(2, 3, 64).bfloat16()
    out = expand_to_mhc(x, mult)
    assert out.shape == (2, 3, mult, 64)
    assert out.is_contiguous()
    assert all(torch.equal(out[:, :, i], x) for i in range(mult))


def test_gradient_is_summed_in_float32_in_ascending_order():
    grad = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    grad[0, :, 0] = torch.tensor([1.0, 2**-8, 2**-8, 0.0])  # in bfloat16 either small term alone would vanish
    grad[0, :, 1] = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])  # 2^24 + 1 is 2^24 in float32
    assert expand_to_mhc_bwd(grad)[0, :2].tolist() == [1.0 + 2**-7, 1.0]


def test_gradient_through_autograd():
    x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
    expand_to_mhc(x, 4).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.eq(4).all()


def test_caller_owned_output():
    x, out = torch.ones(2, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    assert expand_to_mhc(x, 4, out) is out
    assert out.eq(1).all()
    assert expand_to_mhc_fwd(x, mhc_mult=4, out=out) is out
    tracked = x.clone().requires_grad_()
    result = expand_to_mhc(tracked, 4, torch.zeros_like(out))
    result.sum().backward()
    assert tracked.grad.eq(4).all()


def test_no_tokens():
    assert expand_to_mhc(torch.empty(0, 64, dtype=torch.bfloat16), 4).shape == (0, 4, 64)
    assert expand_to_mhc_bwd(torch.empty(0, 4, 64, dtype=torch.bfloat16)).shape == (0, 64)


@pytest.mark.parametrize(
    ("x", "mult", "error", "message"),
    [
        (torch.zeros(2, 64), 4, TypeError, "expand_to_mhc: hidden: expected dtype bfloat16, got float32"),
        (
            torch.zeros(2, 96).bfloat16(),
            4,
            ValueError,
            "hidden: expected a hidden size that is a positive multiple of 64, got 96",
        ),
        (torch.zeros(2, 0).bfloat16(), 4, ValueError, "positive multiple of 64, got 0"),
        (torch.zeros(2, 64).bfloat16(), 0, ValueError, "mhc_mult: expected at least 1, got 0"),
        (
            torch.zeros(64, 2).bfloat16().t(),
            4,
            ValueError,
            r"hidden: expected a contiguous tensor, got strides \[1, 2\]",
        ),
        ([1.0], 4, TypeError, "hidden: expected a torch.Tensor, got list"),
    ],
)
def test_refused(x, mult, error, message):
    with pytest.raises(error, match=message):
        expand_to_mhc(x, mult)


def test_refused_output():
    x = torch.zeros(2, 64).bfloat16()
    with pytest.raises(ValueError, match=r"out: expected shape \[2, 4, 64\], got \[2, 3, 64\]"):
        expand_to_mhc(x, 4, torch.zeros(2, 3, 64).bfloat16())
    spare = torch.zeros(2 * 4 * 64 + 1).bfloat16()[1:].view(2, 4, 64)
    with pytest.raises(ValueError, match="out: expected a 16-byte aligned tensor"):
        expand_to_mhc(x, 4, spare)
