"""group_count, aux_fi, inplace_unique_group_indices."""

import numpy as np
import pytest
import torch

from tk_serving.moe import aux_fi, group_count, inplace_unique_group_indices

IDS = torch.tensor([[0, 2, -1], [2, 3, 2**32], [0, 0, 7]])


def test_group_count():
    result = group_count(IDS, 4)
    assert (result.dtype, result.tolist()) == (torch.int32, [3, 0, 2, 1])
    assert group_count(IDS[:0], 4).tolist() == [0] * 4


def test_more_groups_than_a_kernel_holds():
    assert group_count(IDS, 40_000).tolist()[:8] == [3, 0, 2, 1, 0, 0, 0, 1]


def test_aux_fi():
    result = aux_fi(IDS, 4, 2)
    assert result.dtype == torch.float32
    assert result.tolist() == [float(np.float32(c * 4) / np.float32(3 * 2)) for c in (3, 0, 2, 1)]
    assert aux_fi(IDS[:0], 4, 2).tolist() == [0.0] * 4


def test_aux_fi_divides_once():
    ids = torch.zeros(7, 1, dtype=torch.int64)
    assert aux_fi(ids, 49, 3).tolist()[0] == float(np.float32(343) / np.float32(21))


@pytest.mark.parametrize(
    ("row", "groups", "expected"),
    [
        ([3, 1, 3, -1, 1], 8, [3, 1, -1, -1, -1]),
        ([-7, -7, 0, 0, 0], 8, [-7, -7, 0, -1, -1]),
        ([8, 7, 8, 7, 2**40], 8, [-1, 7, -1, -1, -1]),
        ([0, 1, 2, 3, 4], 5, [0, 1, 2, 3, 4]),
    ],
)
def test_unique(row, groups, expected):
    ids = torch.tensor([row, row])
    assert inplace_unique_group_indices(ids, groups) is None
    assert ids.tolist() == [expected] * 2


def test_unique_of_nothing():
    inplace_unique_group_indices(torch.empty(0, 4, dtype=torch.int64), 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: group_count(IDS.int(), 4), TypeError, "group_count: group_idx: expected dtype int64, got int32"),
        (lambda: group_count(IDS[0], 4), ValueError, r"group_count: group_idx: expected shape \[T, K\], got \[3\]"),
        (lambda: group_count(IDS, 0), ValueError, "group_count: num_groups: expected at least 1, got 0"),
        (lambda: group_count(IDS[:, :2], 4), ValueError, "group_count: group_idx: expected a contiguous tensor"),
        (lambda: aux_fi(IDS, 4, 0), ValueError, "aux_fi: num_aux_topk: expected at least 1, got 0"),
        (lambda: aux_fi(IDS, 0, 1), ValueError, "aux_fi: num_experts: expected at least 1, got 0"),
        (lambda: aux_fi(IDS.float(), 4, 1), TypeError, "aux_fi: topk_idx: expected dtype int64, got float32"),
        (
            lambda: inplace_unique_group_indices(IDS.clone(), 1025),
            ValueError,
            "inplace_unique_group_indices: num_groups: expected 1 to 1024, got 1025",
        ),
        (
            lambda: inplace_unique_group_indices(IDS.int(), 4),
            TypeError,
            "inplace_unique_group_indices: group_indices: expected dtype int64, got int32",
        ),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()
