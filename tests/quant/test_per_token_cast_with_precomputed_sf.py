"""Casts with given scales."""

import pytest
import torch

from tk_serving.quant import per_token_cast, per_token_cast_with_precomputed_sf, scales


def codes(data):
    return data.view(torch.uint8)


@pytest.mark.parametrize("layout", [scales.ROW, scales.COLUMN, scales.PACKED])
def test_own_rounded_scales_give_the_same_data(layout):
    x = torch.randn(5, 576)
    data, sf = per_token_cast(x, "e4m3", 128, round_sf=True)
    found = per_token_cast_with_precomputed_sf(x, "e4m3", 128, scales.lay_out(sf, layout))
    assert torch.equal(codes(found), codes(data))


def test_packed_scales_are_decoded():
    """Not divided by the raw exponent byte."""
    x = torch.full((1, 128), 8.0)
    sf = torch.tensor([[129]], dtype=torch.int32)
    assert per_token_cast_with_precomputed_sf(x, "e4m3", 128, sf).float().unique().tolist() == [2.0]


def test_multiplier_is_the_reciprocal():
    x = torch.tensor([[1.0, 3.0, 7.0, 1e9] + [0.0] * 12])
    sf = torch.tensor([[0.3]])
    expected = (x * (torch.ones(1, 1) / sf)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes(per_token_cast_with_precomputed_sf(x, "e4m3", 16, sf)), codes(expected))


def test_saturation_and_zero_scale():
    x = torch.tensor([[1e4, -1e4, float("nan"), float("inf"), -1.0, 1.0, 0.0, -0.0] * 4])
    sf = torch.tensor([[1.0, 0.0]])
    found = codes(per_token_cast_with_precomputed_sf(x, "e4m3", 16, sf))[0]
    assert found[:8].tolist() == [0x7E, 0xFE, 0x7F, 0x7E, 0xB8, 0x38, 0x00, 0x80]
    assert found[16:].tolist() == [0] * 16
    assert codes(per_token_cast_with_precomputed_sf(x, "e2m1", 16, sf))[0, :8].tolist()[:2] == [0xF7, 0x77]


def test_e4m3_scales():
    x = torch.full((2, 32), 6.0)
    sf = torch.tensor([[2.0, 1.0], [4.0, 3.0]]).to(torch.float8_e4m3fn)
    found = per_token_cast_with_precomputed_sf(x, "e4m3", 16, sf, use_e4m3_sf=True).float()
    assert found[:, ::16].tolist() == [[3.0, 6.0], [1.5, 2.0]]


def test_whole_row_and_strided_scales():
    x = torch.randn(3, 1040)
    sf = torch.rand(3, 4)[:, 1:2]
    expected = (x * (torch.ones(3, 1) / sf)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes(per_token_cast_with_precomputed_sf(x, "e4m3", 1040, sf)), codes(expected))


def test_preallocated():
    out = torch.empty(2, 128, dtype=torch.float8_e4m3fn)
    x, sf = torch.randn(2, 128), torch.ones(2, 1)
    assert per_token_cast_with_precomputed_sf(x, "e4m3", 128, sf, out=out) is out
    assert torch.equal(codes(out), codes(x.clamp(-448, 448).to(torch.float8_e4m3fn)))


@pytest.mark.parametrize(
    ("error", "sf", "flags", "message"),
    [
        (TypeError, torch.ones(2, 1).double(), {}, "sf: expected dtype float32 or int32 or float8_e4m3fn, got float64"),
        (TypeError, torch.ones(2, 1), {"use_packed_ue8m0": True}, "sf: expected dtype int32, got float32"),
        (TypeError, torch.ones(2, 1), {"use_e4m3_sf": True}, "sf: expected dtype float8_e4m3fn, got float32"),
        (ValueError, torch.ones(2, 2), {}, "sf: expected shape [2, 1] (float32 scales of 2 x 1 blocks), got [2, 2]"),
    ],
)
def test_messages(error, sf, flags, message):
    with pytest.raises(error) as caught:
        per_token_cast_with_precomputed_sf(torch.ones(2, 128), "e4m3", 128, sf, **flags)
    assert str(caught.value) == f"per_token_cast_with_precomputed_sf: {message}"
