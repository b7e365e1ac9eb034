"""topk_gate: order, ties, special values, messages."""

import pytest
import torch

from tk_serving.moe import topk_gate

INF, NAN = float("inf"), float("nan")


def ids(row, k):
    return topk_gate(torch.tensor([row], dtype=torch.float32), k).tolist()[0]


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        ([1, -INF, -INF, -INF], 2, [0, 1]),
        ([NAN] * 5, 3, [0, 1, 2]),
        ([0.0, -0.0, 0.0], 3, [0, 1, 2]),
        ([-0.0, 0.0, 1.0], 2, [2, 0]),
        ([NAN, -INF, 5, NAN], 4, [2, 0, 1, 3]),
        ([3, INF, -1, INF], 3, [1, 3, 0]),
        ([7.0], 1, [0]),
    ],
)
def test_order(row, k, expected):
    assert ids(row, k) == expected


def test_g01_nan_row_gives_distinct_ids():
    scores = torch.arange(16.0).repeat(3, 1)
    scores[1, 4] = NAN
    chosen = topk_gate(scores, 4).tolist()
    assert chosen[0] == chosen[1] == chosen[2] == [15, 14, 13, 12]
    scores[1, 12] = NAN
    assert topk_gate(scores, 16)[1].tolist() == [15, 14, 13, 11, 10, 9, 8, 7, 6, 5, 3, 2, 1, 0, 4, 12]


def test_g02_equal_scores():
    assert topk_gate(torch.zeros(2, 384), 8).tolist() == [list(range(8))] * 2


def test_g07_row_stride():
    buffer = torch.full((3, 64), 1e30)
    view = buffer[:, :60]
    view.copy_((17 * torch.arange(3)[:, None] + 7 * torch.arange(60)) % 60)
    with pytest.raises(ValueError, match=r"topk_gate: scores: expected a contiguous tensor, got strides \[64, 1\]"):
        topk_gate(view, 6)
    expected = [[17, 34, 51, 8, 25, 42], [6, 23, 40, 57, 14, 31], [55, 12, 29, 46, 3, 20]]
    assert topk_gate(view.contiguous(), 6).tolist() == expected


def test_g10_any_k_and_expert_count():
    assert topk_gate(200.0 - torch.arange(200.0)[None], 9).tolist() == [list(range(9))]


def test_g11_few_finite_scores():
    assert ids([5, 3, 4] + [-INF] * 13, 8) == [0, 2, 1, 3, 4, 5, 6, 7]


def test_result_layout_and_empty():
    result = topk_gate(torch.empty(0, 8), 2)
    assert (result.shape, result.dtype) == ((0, 2), torch.int64)
    result = topk_gate(torch.rand(3, 8), 2)
    assert (result.shape, result.dtype, result.is_contiguous()) == ((3, 2), torch.int64, True)


@pytest.mark.parametrize(
    ("scores", "k", "error", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.bfloat16), 2, TypeError, "scores: expected dtype float32, got bfloat16"),
        ([[1.0]], 1, TypeError, "scores: expected a torch.Tensor, got list"),
        (torch.zeros(8), 2, ValueError, r"scores: expected shape \[T, E\], got \[8\]"),
        (torch.zeros(2, 0), 1, ValueError, "scores: expected 1 to 4096 experts, got 0"),
        (torch.zeros(1, 4097), 1, ValueError, "scores: expected 1 to 4096 experts, got 4097"),
        (torch.zeros(2, 8), 9, ValueError, "num_topk: expected 1 to 8, got 9"),
        (torch.zeros(2, 8), 0, ValueError, "num_topk: expected 1 to 8, got 0"),
        (torch.zeros(2, 8), 2.0, TypeError, "num_topk: expected int, got float"),
    ],
)
def test_messages(scores, k, error, message):
    with pytest.raises(error, match=f"^topk_gate: {message}"):
        topk_gate(scores, k)
