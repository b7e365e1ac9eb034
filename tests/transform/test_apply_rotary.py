"""apply_rotary: pairs, positions, partial rotation, limits, messages."""

import math

import pytest
import torch

from tk_serving.transform import apply_rotary


def cache(*rows):
    """Rows of cosines followed by sines."""
    return torch.tensor([[*cosines, *sines] for cosines, sines in rows])


# A quarter turn in the first pair, none in the second; then the reverse.
QUARTER = cache(((0.0, 1.0), (1.0, 0.0)), ((1.0, 0.0), (0.0, 1.0)))


def rotated(values, table=QUARTER, dtype=torch.float32, **options):
    query = torch.tensor(values, dtype=dtype)
    assert apply_rotary(query, table, **options) is None
    return query.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pairs(dtype):
    one = [[[1.0, 2.0, 3.0, 4.0]]]
    assert rotated(one, dtype=dtype) == [[[-3.0, 2.0, 1.0, 4.0]]]
    assert rotated(one, dtype=dtype, conjugate=True) == [[[3.0, 2.0, -1.0, 4.0]]]
    assert rotated(one, dtype=dtype, interleaved=True) == [[[-2.0, 1.0, 3.0, 4.0]]]
    assert rotated(one, dtype=dtype, interleaved=True, conjugate=True) == [[[2.0, -1.0, 3.0, 4.0]]]


def test_row_is_token_plus_offset():
    two = [[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]
    first, second = [[-3.0, 2.0, 1.0, 4.0]], [[1.0, -4.0, 3.0, 2.0]]
    unchanged = two[0]
    assert rotated(two) == [first, second]
    assert rotated(two, seqlen_offset=1) == [second, unchanged]
    assert rotated(two, seqlen_offset=-1) == [unchanged, first]
    assert rotated([two, two]) == [[first, second]] * 2, "the index counts within each sequence"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_row_is_position_plus_offset(dtype):
    two = [[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]
    first, second = [[-3.0, 2.0, 1.0, 4.0]], [[1.0, -4.0, 3.0, 2.0]]
    assert rotated(two, positions=torch.tensor([1, 0], dtype=dtype)) == [second, first]
    assert rotated(two, positions=torch.tensor([-1, 2], dtype=dtype)) == two
    assert rotated(two, positions=torch.tensor([-1, 2], dtype=dtype), seqlen_offset=1) == [first, two[1]]
    batch = torch.tensor([[1, 0], [0, 1]], dtype=dtype)
    assert rotated([two, two], positions=batch) == [[second, first], [first, second]]


def test_key_with_its_own_heads_and_partial_rotation():
    table = cache(((0.0, 0.0), (1.0, 1.0)))
    query = torch.arange(12.0).view(1, 2, 6)
    key = torch.arange(4.0).view(1, 1, 4)
    apply_rotary(query[..., -4:], table, key)
    assert query.tolist() == [[[0, 1, -4, -5, 2, 3], [6, 7, -10, -11, 8, 9]]]
    assert key.tolist() == [[[-2, -3, 0, 1]]]


def test_fma_and_rounding():
    """cos a - sin b with one rounding after the product sin b; two roundings would give 0."""
    near_one = 1 + 2.0**-12
    query = torch.tensor([[[near_one, near_one]]])
    apply_rotary(query, cache(((near_one,), (near_one,))))
    exact = near_one * near_one
    rounded = float(torch.tensor(exact).float())
    assert exact != rounded
    assert query.flatten().tolist() == [exact - rounded, float(torch.tensor(exact + rounded).float())]
    half = torch.tensor([[[1.0, 0.0]]], dtype=torch.bfloat16)
    apply_rotary(half, cache(((1 + 2.0**-8,), (1 + 3 * 2.0**-8,))))
    assert half.flatten().tolist() == [1.0, 1 + 2.0**-6], "ties go to the even bfloat16"


def test_rotation_is_undone_by_the_conjugate():
    angles = torch.rand(16, 32) * 2 * math.pi
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    query = torch.randn(16, 2, 64)
    expected = torch.view_as_complex(query.view(16, 2, 32, 2)) * torch.polar(torch.ones(()), angles)[:, None]
    turned = query.clone()
    apply_rotary(turned, table, interleaved=True)
    torch.testing.assert_close(torch.view_as_complex(turned.view(16, 2, 32, 2)), expected, rtol=1e-5, atol=1e-5)
    apply_rotary(turned, table, interleaved=True, conjugate=True)
    torch.testing.assert_close(turned, query, rtol=1e-5, atol=1e-5)


def test_no_tokens():
    apply_rotary(torch.empty(0, 2, 4), QUARTER)
    apply_rotary(torch.empty(2, 0, 2, 4), QUARTER, torch.empty(2, 0, 1, 4), torch.empty(2, 0, dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"query": torch.zeros(2, 1, 4, dtype=torch.float16)},
            TypeError,
            "query: expected dtype bfloat16 or float32, got float16",
        ),
        (
            {"query": torch.zeros(2, 4)},
            ValueError,
            "query: expected [T, heads, rot] or [B, S, heads, rot], got shape [2, 4]",
        ),
        (
            {"query": torch.zeros(2, 1, 3)},
            ValueError,
            "query: expected a last dimension that is a positive multiple of 2, got 3",
        ),
        ({"query": torch.zeros(2, 0, 4)}, ValueError, "query: expected at least one head, got shape [2, 0, 4]"),
        ({"query": torch.zeros(2, 4, 4).mT}, ValueError, "query: expected stride(-1) == 1, got strides [16, 1, 4]"),
        ({"cos_sin_cache": torch.zeros(2, 6)}, ValueError, "cos_sin_cache: expected shape [P, 4], got [2, 6]"),
        ({"cos_sin_cache": QUARTER.bfloat16()}, TypeError, "cos_sin_cache: expected dtype float32, got bfloat16"),
        ({"key": torch.zeros(3, 1, 4)}, ValueError, "key: expected shape [2, heads, 4], got [3, 1, 4]"),
        ({"key": torch.zeros(2, 1, 4).bfloat16()}, TypeError, "key: expected dtype float32, got bfloat16"),
        ({"positions": torch.zeros(3).long()}, ValueError, "positions: expected shape [2], got [3]"),
        ({"positions": torch.zeros(2)}, TypeError, "positions: expected dtype int32 or int64, got float32"),
    ],
)
def test_messages(change, error, message):
    arguments = {"query": torch.zeros(2, 1, 4), "cos_sin_cache": QUARTER} | change
    with pytest.raises(error) as raised:
        apply_rotary(**arguments)
    assert str(raised.value) == f"apply_rotary: {message}"
