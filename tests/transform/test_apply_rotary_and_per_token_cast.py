"""apply_rotary_and_per_token_cast: angles, order of rounding, scales, layout, messages."""

import pytest
import torch

from tk_serving.transform import apply_rotary, apply_rotary_and_per_token_cast

STEP = 2.0**-22  # of float32 from 2 to 4


def cache(rows=16, rot=64, seed=3):
    angles = torch.rand(rows, rot // 2, generator=torch.Generator().manual_seed(seed)) * 6.28
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def heads(tokens, count, dim, seed=1):
    return torch.randn(tokens, count, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()


def places(tokens, rows=16, seed=2):
    return torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(seed))


def dequantised(data, sf):
    return data.double() * sf.double().repeat_interleave(128, dim=-1)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize(("count", "dim", "rot", "groups"), [(4, 256, 64, 2), (2, 128, 128, 1), (3, 512, 8, 3)])
def test_values_and_scales_are_those_of_the_formula(count, dim, rot, groups, conjugate):
    x, table, at = heads(5, count, dim), cache(rot=rot), places(5)
    data, sf = apply_rotary_and_per_token_cast(x, table, at, groups, conjugate)
    cos, sin = table[at].double()[:, None].chunk(2, dim=-1)
    turn = torch.complex(cos, -sin if conjugate else sin)
    pairs = torch.view_as_complex(x[..., dim - rot :].double().unflatten(-1, (-1, 2)))
    expected = x.double()
    expected[..., dim - rot :] = torch.view_as_real(pairs * turn).flatten(-2)
    expected = expected.view(5, groups, -1)
    amax = expected.unflatten(-1, (-1, 128)).abs().amax(-1)
    assert torch.equal(sf.double(), torch.exp2((amax / 448).log2().ceil()))
    # A step of e4m3 is an eighth of a value's power of two, and no less than 2^-9; half of it at most.
    room = torch.maximum(expected.abs() / 16, sf.double().repeat_interleave(128, dim=-1) * 2.0**-10)
    assert bool(((dequantised(data, sf) - expected).abs() <= room * (1 + 1e-6)).all())
    assert float((dequantised(data, sf) - expected).abs().max()) > 0


@pytest.mark.parametrize("place", [0, 1], ids=["first of the pair", "second of the pair"])
@pytest.mark.parametrize("conjugate", [False, True])
def test_the_product_with_the_cosine_is_not_rounded(conjugate, place):
    """5 (5/8 + 2^-24) - 5/8 STEP is 5/8 STEP above 3.125, the tie of e4m3, and rounds up; the product rounded first
    would give the tie itself, and 3."""
    table = torch.tensor([[0.625 + 2.0**-24, 0.625 * STEP]])
    subtracts = conjugate == (place == 1)
    if not subtracts:
        table[0, 1] *= -1
    x = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    x[0, 0, 0], x[0, 0, 126 + place], x[0, 0, 127 - place] = 256.0, 5.0, 1.0
    table = torch.cat((torch.ones(1, 3), table[:, :1], torch.zeros(1, 3), table[:, 1:]), dim=1)
    data, sf = apply_rotary_and_per_token_cast(x, table, torch.zeros(1, dtype=torch.long), 1, conjugate)
    assert sf.tolist() == [[[1.0]]]
    assert data.float()[0, 0, 126 + place] == 3.25


def test_rotated_values_are_not_rounded_before_the_cast():
    x, table, at = heads(64, 2, 128), cache(), places(64)
    data, _ = apply_rotary_and_per_token_cast(x, table, at, 1, True)
    rounded = x.clone()
    apply_rotary(rounded[..., 64:], table, None, at, True, True)
    again, _ = apply_rotary_and_per_token_cast(rounded, torch.tensor([[1.0] * 4 + [0.0] * 4]), at * 0, 1)
    differs = (data.view(torch.uint8) != again.view(torch.uint8)).view(64, 2, 128)
    assert not differs[..., :64].any()
    assert differs[..., 64:].any()


def test_groups_of_heads_lie_one_behind_the_other():
    x, table, at = heads(5, 6, 256), cache(), places(5)
    data, sf = apply_rotary_and_per_token_cast(x, table, at, 3)
    assert (data.shape, data.stride()) == ((5, 3, 512), (512, 5 * 512, 1))
    assert (sf.shape, sf.stride()) == ((5, 3, 4), (1, 4 * 8, 8))
    assert not sf.as_strided((12, 3), (8, 1), 5).any(), "padding rows of the scales are zero"
    whole, whole_sf = apply_rotary_and_per_token_cast(x, table, at, 1)
    assert torch.equal(data.reshape(5, -1).view(torch.uint8), whole.reshape(5, -1).view(torch.uint8))
    assert torch.equal(sf.reshape(5, -1), whole_sf.reshape(5, -1))
    first, _ = apply_rotary_and_per_token_cast(x[:, :2], table, at, 1)
    assert torch.equal(data[:, 0].view(torch.uint8), first[:, 0].view(torch.uint8)), "heads that are cut off"


def test_other_strides_and_dtypes_of_the_same_values():
    x, table, at = heads(5, 2, 128), cache(), places(5)
    data, sf = apply_rotary_and_per_token_cast(x, table, at, 2)
    wide = torch.cat((table, table), dim=1)[:, :64]
    by_head = x.transpose(0, 1).contiguous().transpose(0, 1)
    other, other_sf = apply_rotary_and_per_token_cast(by_head, wide, at.int(), 2)
    assert torch.equal(data.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(sf, other_sf)


def test_positions_outside_the_cache_turn_by_nothing():
    x, table = heads(3, 2, 128), cache()
    data, sf = apply_rotary_and_per_token_cast(x, table, torch.tensor([-1, 16, 2**40]), 2, True)
    still = torch.tensor([[1.0] * 32 + [0.0] * 32])
    expected, expected_sf = apply_rotary_and_per_token_cast(x, still, torch.zeros(3, dtype=torch.long), 2, True)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(sf, expected_sf)


def test_smallest_and_largest_scales_and_values_that_are_no_numbers():
    x = torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    x[0, 1, 5], x[0, 2, 5] = 448.0, 450.0
    x[0, 3, 5], x[0, 3, 6] = torch.nan, 1.0
    still = torch.tensor([[1.0] * 4 + [0.0] * 4])
    data, sf = apply_rotary_and_per_token_cast(x, still, torch.zeros(1, dtype=torch.long), 4)
    assert sf.flatten().tolist() == [2.0**-42, 1.0, 2.0, 2.0**-8], "1e-10 / 448 is just below 2^-42"
    assert data.float()[0, 1:3, 5].tolist() == [448.0, 224.0]
    assert data.float()[0, 3, 5].isnan()
    assert data.float()[0, 3, 6] == 256.0


def test_no_tokens():
    data, sf = apply_rotary_and_per_token_cast(heads(0, 4, 128), cache(), places(0), 2)
    assert (data.shape, sf.shape) == ((0, 2, 256), (0, 2, 2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 2, 128)}, TypeError, "x: expected dtype bfloat16, got float32"),
        ({"x": heads(2, 2, 128)[0]}, ValueError, "x: expected shape [T, heads, head_dim], got [2, 128]"),
        (
            {"x": heads(2, 2, 64)},
            ValueError,
            "x: expected a last dimension that is a positive multiple of 128, got 64",
        ),
        ({"x": heads(2, 3, 128)}, ValueError, "x: expected a number of heads that is a positive multiple of 2, got 3"),
        (
            {"x": heads(2, 128, 128).mT},
            ValueError,
            "x: expected stride(-1) == 1, got strides [16384, 1, 128]",
        ),
        (
            {"x": heads(2, 2, 136)[..., 1:129]},
            ValueError,
            "x: expected heads that begin at aligned addresses, multiples of 16 bytes, got others",
        ),
        ({"num_groups": 0}, ValueError, "num_groups: expected a positive number, got 0"),
        ({"cos_sin_cache": cache().bfloat16()}, TypeError, "cos_sin_cache: expected dtype float32, got bfloat16"),
        (
            {"cos_sin_cache": cache(rot=60)},
            ValueError,
            "cos_sin_cache: expected a last dimension that is a positive multiple of 8, got 60",
        ),
        (
            {"cos_sin_cache": cache(rot=136)},
            ValueError,
            "cos_sin_cache: expected a last dimension up to head_dim = 128, got 136",
        ),
        ({"cos_sin_cache": cache(rows=0)}, ValueError, "cos_sin_cache: expected at least one row, got shape [0, 64]"),
        ({"positions": places(3)}, ValueError, "positions: expected shape [2], got [3]"),
        (
            {"positions": places(2).float()},
            TypeError,
            "positions: expected dtype int32 or int64, got float32",
        ),
    ],
)
def test_messages(change, error, message):
    arguments = {"x": heads(2, 2, 128), "cos_sin_cache": cache(), "positions": places(2), "num_groups": 2} | change
    with pytest.raises(error) as raised:
        apply_rotary_and_per_token_cast(**arguments)
    assert str(raised.value) == f"apply_rotary_and_per_token_cast: {message}"
