"""engram_hash: the specification's example, wrap-around, remainders, masks, messages."""

import pytest
import torch

from tk_serving.engram import engram_hash


def i32(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def wrap(value: int) -> int:
    """A Python integer as a signed 64-bit one."""
    return (value + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(("multiplier", "row"), [(11, 5), (-11, 94)])
def test_example(multiplier, row):
    rows = engram_hash(i32([7, 3]), torch.tensor([[multiplier, 13]]), i32([[101]]), i32([0]))
    assert (rows.dtype, rows.tolist()) == (torch.int32, [[[row]]])


def test_against_python_integers():
    generator = torch.Generator().manual_seed(3)
    layers, tokens, ngram, tables = 2, 6, 4, 3
    ids = torch.randint(-5, 2**31 - 1, (tokens, ngram), generator=generator).to(torch.int32)
    multipliers = torch.randint(-(2**63), 2**63 - 1, (layers, ngram), generator=generator) | 1
    sizes = torch.randint(1, 2**24, (layers, ngram - 1, tables), generator=generator).to(torch.int32)
    offsets = torch.randint(0, 2**30, (layers, (ngram - 1) * tables), generator=generator).to(torch.int32)
    expected = []
    for layer in range(layers):
        for token in range(tokens):
            products = [wrap(ids[token, i].item() * multipliers[layer, i].item()) for i in range(ngram)]
            value = products[0]
            for i in range(1, ngram):
                value ^= products[i]
                for j in range(tables):
                    offset = offsets[layer, (i - 1) * tables + j].item()
                    expected.append(value % sizes[layer, i - 1, j].item() + offset)
    assert engram_hash(ids, multipliers, sizes, offsets).flatten().tolist() == expected


def test_product_wraps():
    """3 * 2^62 wraps to -2^62."""
    rows = engram_hash(i32([3, 0]), torch.tensor([[2**62, 1]]), i32([[1000]]), i32([0]))
    assert rows.item() == wrap(3 * 2**62) % 1000 == -(2**62) % 1000


def test_table_without_rows():
    sizes = i32([[101, 0, -4]])
    assert engram_hash(i32([7, 3]), torch.tensor([[11, 13]]), sizes, i32([10, 20, 30])).tolist() == [[[15, -1, -1]]]


def test_image_tokens():
    mask = torch.tensor([True, False])
    rows = engram_hash(
        i32([7, 3], [7, 3]), torch.tensor([[11, 13]]), i32([[101, 50]]), i32([0, 101]), image_token_mask=mask
    )
    assert rows.tolist() == [[[-1, -1], [5, 107]]]


@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_e02_shape_of_the_first_call(tokens):
    """Two layers with 24 table rows for each token."""
    sizes = torch.full((2, 3, 8), 16_000_057, dtype=torch.int32)
    rows = engram_hash(
        torch.ones(tokens, 4, dtype=torch.int32), torch.ones(2, 4).long(), sizes, torch.zeros(2, 24, dtype=torch.int32)
    )
    assert (rows.shape, rows.is_contiguous()) == ((2, tokens, 24), True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ngram_token_ids": torch.zeros(5, 2).long()}, TypeError, "ngram_token_ids: expected dtype int32, got int64"),
        (
            {"ngram_token_ids": torch.zeros(5, 1).int()},
            ValueError,
            "ngram_token_ids: expected at least 2 columns, got [5, 1]",
        ),
        ({"multipliers": torch.ones(2, 3).long()}, ValueError, "multipliers: expected shape [L, 2], got [2, 3]"),
        ({"multipliers": torch.ones(2)}, TypeError, "multipliers: expected dtype int64, got float32"),
        (
            {"vocab_sizes": torch.ones(3, 1, 4).int()},
            ValueError,
            "vocab_sizes: expected shape [2, 1, t], got [3, 1, 4]",
        ),
        ({"offsets": torch.ones(2, 5).int()}, ValueError, "offsets: expected shape [2, 4], got [2, 5]"),
        ({"image_token_mask": torch.ones(5)}, TypeError, "image_token_mask: expected dtype bool, got float32"),
        ({"image_token_mask": torch.ones(1, 5).bool()}, ValueError, "image_token_mask: expected shape [5], got [1, 5]"),
    ],
)
def test_messages(change, error, message):
    arguments = {
        "ngram_token_ids": torch.zeros(5, 2).int(),
        "multipliers": torch.ones(2, 2).long(),
        "vocab_sizes": torch.ones(2, 1, 4).int(),
        "offsets": torch.zeros(2, 4).int(),
    } | change
    with pytest.raises(error) as raised:
        engram_hash(**arguments)
    assert str(raised.value) == f"engram_hash: {message}"
