"""normalize_weight: order of the sum, zero rows, messages."""

import numpy as np
import pytest
import torch

from tk_serving.moe import normalize_weight


def test_sum_in_ascending_order():
    weights = torch.tensor([[1.0, 2**-24, 2**-24, 2**-24], [2**-24, 2**-24, 2**-24, 1.0]])
    denominator, normalised = normalize_weight(weights)
    total = [np.float32(1e-20), np.float32(1e-20)]
    for row in range(2):
        for weight in weights[row].numpy():
            total[row] = np.float32(total[row] + weight)
    assert denominator.tolist() == [float(t) for t in total] == [1.0, 1.0 + 2**-22]
    assert normalised.tolist() == [[float(w / t) for w in row] for row, t in zip(weights.numpy(), total, strict=True)]


def test_zero_row():
    denominator, normalised = normalize_weight(torch.zeros(2, 6))
    assert denominator.tolist() == [float(np.float32(1e-20))] * 2
    assert normalised.tolist() == [[0.0] * 6] * 2


def test_empty():
    denominator, normalised = normalize_weight(torch.empty(0, 8))
    assert (denominator.shape, normalised.shape) == ((0,), (0, 8))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.float64), TypeError, "expected dtype float32, got float64"),
        (torch.zeros(2), ValueError, r"expected shape \[T, K\], got \[2\]"),
        (torch.zeros(2, 0), ValueError, "expected at least one column"),
        (torch.zeros(2, 4)[:, :2], ValueError, r"expected a contiguous tensor, got strides \[4, 1\]"),
    ],
)
def test_messages(weights, error, message):
    with pytest.raises(error, match=f"^normalize_weight: topk_weights: {message}"):
        normalize_weight(weights)
