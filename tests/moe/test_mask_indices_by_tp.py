"""mask_indices_by_tp: the example of the specification, out-of-range ids, messages."""

import pytest
import torch

from tk_serving.moe import mask_indices_by_tp


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [0, 1, 2, 3, -1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1]),
        (1, [-1, -1, -1, -1, 0, 1, 2, 3, -1, -1, -1, -1, 4, 5, 6, 7]),
    ],
)
def test_example(dtype, rank, expected):
    result = mask_indices_by_tp(torch.arange(16, dtype=dtype).view(2, 8), 16, 4, rank, 2)
    assert (result.dtype, result.shape) == (dtype, (2, 8))
    assert result.flatten().tolist() == expected


def literal(v, n, ep, rank, tp):
    per = n // ep
    if v < 0 or v >= n or (v // per) % tp != rank:
        return -1
    v -= rank * per
    d = v // (per * tp)
    v -= d * (per * tp - per)
    return v if v >= 0 else -1


@pytest.mark.parametrize(("n", "ep", "tp"), [(16, 1, 1), (17, 4, 2), (391, 8, 4), (7, 7, 3), (256, 64, 8)])
def test_against_the_rule(n, ep, tp):
    ids = torch.arange(-3, n + 3)[:, None]
    for rank in range(tp):
        expected = [literal(v, n, ep, rank, tp) for v in range(-3, n + 3)]
        assert mask_indices_by_tp(ids, n, ep, rank, tp).flatten().tolist() == expected


def test_ids_past_32_bits_are_out_of_range():
    ids = torch.tensor([[2**32, 2**32 + 1, -(2**32), 1]])
    assert mask_indices_by_tp(ids, 16, 4, 0, 2).tolist() == [[-1, -1, -1, 1]]


@pytest.mark.parametrize("first", [0, 250, 256])
def test_m05_range_beyond_the_last_expert(first):
    """A rank of 16 experts that starts at 250 of 256 does not exist; ids past the last expert are nobody's."""
    with pytest.raises(ValueError, match=r"^mask_indices_by_tp: tp_rank: expected 0 to 15, got 16$"):
        mask_indices_by_tp(torch.zeros(1, 1, dtype=torch.int32), 256, 16, 16, 16)
    ids = torch.arange(first, first + 16)[:, None]
    owners = [mask_indices_by_tp(ids, 256, 16, rank, 16) for rank in range(16)]
    kept = torch.stack(owners).ge(0).sum(dim=0).flatten()
    assert kept.tolist() == [int(expert < 256) for expert in range(first, first + 16)]
    assert torch.stack(owners).max() < 16


def test_empty():
    assert mask_indices_by_tp(torch.empty(0, 8, dtype=torch.int32), 16, 4, 0, 2).shape == (0, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2, 2), 16, 4, 0, 2), TypeError, "indices: expected dtype int64 or int32, got float32"),
        ((torch.zeros(2, dtype=torch.int32), 16, 4, 0, 2), ValueError, r"indices: expected shape \[T, K\], got \[2\]"),
        ((torch.zeros(2, 4, dtype=torch.int32)[:, ::2], 16, 4, 0, 2), ValueError, "indices: expected a contiguous"),
        ((torch.zeros(2, 2, dtype=torch.int32), 3, 4, 0, 2), ValueError, "n: expected 4 to 2147483647, got 3"),
        ((torch.zeros(2, 2, dtype=torch.int32), 16, 0, 0, 2), ValueError, "num_ep_ranks: expected at least 1, got 0"),
        ((torch.zeros(2, 2, dtype=torch.int32), 16, 4, 2, 2), ValueError, "tp_rank: expected 0 to 1, got 2"),
        ((torch.zeros(2, 2, dtype=torch.int32), 16, 4, 0, 0), ValueError, "num_tp_ranks: expected at least 1, got 0"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=f"^mask_indices_by_tp: {message}"):
        mask_indices_by_tp(*arguments)
