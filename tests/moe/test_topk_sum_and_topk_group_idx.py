"""topk_sum_and_topk_group_idx: sums, ties, special values, messages."""

import pytest
import torch

from tk_serving.moe import topk_sum_and_topk_group_idx

INF, NAN = float("inf"), float("nan")


def best(groups, summed, k):
    return topk_sum_and_topk_group_idx(torch.tensor([groups], dtype=torch.float32), summed, k).tolist()[0]


@pytest.mark.parametrize(
    ("groups", "summed", "k", "expected"),
    [
        ([[10, 10, 5], [19, 0.5, 0], [11, 8, 8]], 2, 3, [0, 1, 2]),  # 20, 19.5, 19: equal maxima both count
        ([[10, 10, 5], [19, 0.5, 0], [11, 8, 8]], 1, 3, [1, 2, 0]),
        ([[0, 0], [0, 0], [0, 0]], 2, 2, [0, 1]),
        ([[-0.0, -0.0], [0.0, 0.0]], 2, 2, [0, 1]),
        ([[NAN, NAN], [-INF, -INF], [-1, -1]], 2, 3, [2, 0, 1]),
        ([[INF, -INF], [1, 1], [-1, 0]], 2, 3, [1, 0, 2]),  # the largest and the lowest finite value give 0
        ([[INF, 5], [3e38, 3e38]], 1, 2, [0, 1]),
        ([[1], [2]], 1, 1, [1]),
    ],
)
def test_groups(groups, summed, k, expected):
    assert best(groups, summed, k) == expected


def test_sum_is_rounded_to_float32():
    # 1 + 2^-25 rounds to 1: a tie, to the lower group.
    assert best([[1, 0], [1, 2**-25]], 2, 1) == [0]
    assert best([[1, 0], [1, 2**-22]], 2, 1) == [1]


def test_empty():
    result = topk_sum_and_topk_group_idx(torch.empty(0, 8, 32), 2, 4)
    assert (result.shape, result.dtype) == ((0, 4), torch.int64)


@pytest.mark.parametrize(
    ("scores", "summed", "k", "error", "message"),
    [
        (torch.zeros(2, 8, 4).half(), 2, 4, TypeError, "scores: expected dtype float32, got float16"),
        (torch.zeros(2, 8), 2, 4, ValueError, r"scores: expected shape \[T, G, Eg\], got \[2, 8\]"),
        (torch.zeros(2, 33, 4), 2, 4, ValueError, "scores: expected 1 to 32 groups, got 33"),
        (torch.zeros(2, 8, 4), 3, 4, ValueError, "num_topk_sum: expected 1 or 2, got 3"),
        (torch.zeros(2, 8, 1), 2, 4, ValueError, "scores: expected groups of at least 2 experts, got 1"),
        (torch.zeros(2, 8, 4), 2, 9, ValueError, "num_topk_groups: expected 1 to 8, got 9"),
    ],
)
def test_messages(scores, summed, k, error, message):
    with pytest.raises(error, match=f"^topk_sum_and_topk_group_idx: {message}"):
        topk_sum_and_topk_group_idx(scores, summed, k)
