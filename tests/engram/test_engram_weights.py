"""fused_weight and grad_w_reduce: products, order of the sum, accumulation, messages."""

import pytest
import torch

from tk_serving.engram import fused_weight, grad_w_reduce


def test_float32_product():
    """(1 + 2^-7)^2 needs 14 bits: exact in float32, not in bfloat16."""
    weight = torch.full((4, 256), 1 + 2.0**-7).bfloat16()
    fused = fused_weight(weight, -weight)
    assert (fused.dtype, fused.shape) == (torch.float32, (4, 256))
    assert fused.unique().tolist() == [-(1 + 2.0**-6 + 2.0**-14)]


def test_fused_weight_messages():
    weight = torch.ones(4, 256).bfloat16()
    with pytest.raises(TypeError, match=r"^fused_weight: weight_hidden: expected dtype bfloat16, got float32$"):
        fused_weight(weight.float(), weight)
    with pytest.raises(ValueError, match=r"^fused_weight: weight_embed: expected shape \[4, 256\], got \[3, 256\]$"):
        fused_weight(weight, weight[:3])
    with pytest.raises(
        ValueError, match=r"^fused_weight: weight_hidden: expected a last dimension that is a positive multiple of 256"
    ):
        fused_weight(weight[:, :128].contiguous(), weight)


def reduce(partial, hidden=2.0, embed=3.0, start=10.0):
    shape = partial.shape[1:]
    weights = torch.full(shape, hidden).bfloat16(), torch.full(shape, embed).bfloat16()
    gradients = torch.full(shape, start), torch.full(shape, -start)
    assert grad_w_reduce(partial, *weights, *gradients) is None
    return gradients


def test_gradients_are_accumulated():
    partial = torch.arange(1.0, 4.0)[:, None, None].expand(3, 2, 256).contiguous()
    by_hidden, by_embed = reduce(partial)
    assert by_hidden.unique().tolist() == [10 + 6 * 3]
    assert by_embed.unique().tolist() == [-10 + 6 * 2]


@pytest.mark.parametrize(("order", "total"), [((0, 1, 2), 0.0), ((0, 2, 1), 1.0)])
def test_ascending_float32_sum(order, total):
    """2^24 + 1 rounds to 2^24 in float32."""
    values = torch.tensor([2.0**24, 1.0, -(2.0**24)])[list(order)]
    by_hidden, _ = reduce(values[:, None, None].expand(3, 1, 256).contiguous(), embed=1.0, start=0.0)
    assert by_hidden.unique().tolist() == [total]


def test_one_partial_sum():
    assert reduce(torch.ones(1, 1, 256), start=0.0)[0].unique().tolist() == [3.0]


def test_grad_w_reduce_messages():
    weight, gradient = torch.ones(2, 256).bfloat16(), torch.zeros(2, 256)
    with pytest.raises(
        ValueError, match=r"^grad_w_reduce: grad_w_partial: expected shape \[P, 2, 256\], got \[2, 256\]$"
    ):
        grad_w_reduce(torch.ones(2, 256), weight, weight, gradient, gradient.clone())
    with pytest.raises(
        ValueError, match=r"^grad_w_reduce: grad_w_partial: expected at least one partial sum, got \[0, 2, 256\]$"
    ):
        grad_w_reduce(torch.ones(0, 2, 256), weight, weight, gradient, gradient.clone())
    with pytest.raises(TypeError, match=r"^grad_w_reduce: grad_weight_embed: expected dtype float32, got bfloat16$"):
        grad_w_reduce(torch.ones(1, 2, 256), weight, weight, gradient, weight.clone())
