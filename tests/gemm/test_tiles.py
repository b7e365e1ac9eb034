"""The layout of FP4 weights for FP8 tensor cores: where all lies, exactness and its limits, the way from Marlin's."""

import pytest
import torch

from tk_serving.gemm import tiles
from tk_serving.quant import marlin
from tk_serving.quant.formats import decode_e2m1


def raw(experts, m, k, low, high, seed=0):
    """Codes int8 [E, M, K / 2] and exponents uint8 [E, M, K / 32]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (experts, m, k // 2), generator=generator, dtype=torch.int8)
    return codes, torch.randint(low, high + 1, (experts, m, k // 32), generator=generator, dtype=torch.uint8)


def weights(codes, exponents):
    """float64 values of codes with e8m0 scales."""
    scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, -1)
    return decode_e2m1(codes).double() * scales


def test_codes_and_exponents_lie_as_described():
    codes, exponents = raw(1, 128, 256, 0, tiles.REACH)
    packed = tiles.pack(codes, exponents)
    assert packed.shape == (1, 2, 2, tiles.TILE)
    nibbles = torch.stack((codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4), -1).view(1, 128, 256)
    for m, k in [(0, 0), (1, 1), (9, 37), (63, 127), (64, 128), (77, 200), (121, 255)]:
        tile = packed[0, m // 64, k // 128].tolist()
        w, r, g = m % 64 // 16, m % 16 // 8, m % 8
        s, q, j = k % 128 // 32, k % 16 // 4, k % 32 // 16 * 4 + k % 4
        thread = 32 * w + 4 * g + q
        word = int.from_bytes(bytes(tile[2048 * r + 16 * thread + 4 * s :][:4]), "little")
        sign = 7 + 8 * j if j < 4 else 3 + 8 * (j - 4)
        assert (word >> 4 * j & 7) | (word >> sign & 1) << 3 == nibbles[0, m, k]
        assert tile[4096 + 64 * w + 8 * g + 4 * r + s] == exponents[0, m, k // 32]


def test_packing_is_undone():
    codes, exponents = raw(2, 64, 384, 0, tiles.REACH)
    again = tiles.unpack(tiles.pack(codes, exponents))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], exponents)


@pytest.mark.parametrize(("low", "high"), [(110, 110 + tiles.REACH), (0, tiles.REACH), (254 - tiles.REACH, 254)])
@pytest.mark.parametrize("experts_at_once", [1, 2])
def test_values_of_marlin_weights_stay_exactly(low, high, experts_at_once, monkeypatch):
    monkeypatch.setattr(tiles, "CODES_AT_ONCE", experts_at_once * 128 * 256)
    codes, exponents = raw(3, 128, 256, low, high)
    data, sf = marlin.pack_codes(codes), marlin.pack_exponents(exponents)
    assert tiles.exact(data, sf)
    found, row_sf = tiles.from_marlin(data, sf)
    parts, above = tiles.unpack(found)
    seen = decode_e2m1(parts).double() * torch.exp2(above.double() - 13).repeat_interleave(32, -1)
    assert torch.equal(seen * row_sf.double()[..., None], weights(codes, exponents))
    # What wgmma multiplies is e5m2.
    assert torch.equal(seen.float().to(torch.float8_e5m2).double(), seen)


def test_marlin_layout_comes_back():
    codes, exponents = raw(2, 128, 256, 100, 120)
    data, sf = marlin.pack_codes(codes), marlin.pack_exponents(exponents)
    again = tiles.to_marlin(*tiles.from_marlin(data, sf))
    assert torch.equal(again[0], data)
    assert torch.equal(again[1], sf)


def test_results_are_written_where_they_are_wanted():
    codes, exponents = raw(2, 128, 128, 100, 120)
    arguments = marlin.pack_codes(codes), marlin.pack_exponents(exponents)
    out = torch.zeros(2, 2, 1, tiles.TILE, dtype=torch.uint8), torch.zeros(2, 128)
    assert tiles.from_marlin(*arguments, out) is out
    for mine, made in zip(out, tiles.from_marlin(*arguments), strict=True):
        assert torch.equal(mine, made)


def test_values_are_those_of_one_scale_a_row():
    codes, exponents = raw(1, 64, 128, 120, 130)
    found = tiles.values(*tiles.from_marlin(marlin.pack_codes(codes), marlin.pack_exponents(exponents)))
    assert torch.equal(found.double(), weights(codes, exponents))


def test_exactness_looks_at_each_expert_and_row():
    codes, exponents = raw(2, 128, 256, 120, 122)
    exponents[1, 100, 5] = 122 - tiles.REACH - 1
    exponents[1, 100, 2] = 122
    packed = marlin.pack_codes(codes), marlin.pack_exponents(exponents)
    assert tiles.exact(packed[0][:1], packed[1][:1])
    assert not tiles.exact(*packed)
    codes[1, 100, 5 * 16 : 6 * 16] = -128 + 8  # two zeros of either sign in a byte
    packed = marlin.pack_codes(codes), marlin.pack_exponents(exponents)
    assert tiles.exact(*packed)
    assert torch.equal(tiles.values(*tiles.from_marlin(*packed)).double(), weights(codes, exponents))


def test_scales_are_float32_whatever_the_default_type():
    codes, exponents = raw(1, 64, 128, 120, 122)
    arguments = marlin.pack_codes(codes), marlin.pack_exponents(exponents)
    want = tiles.from_marlin(*arguments)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = tiles.from_marlin(*arguments)
        dense = tiles.values(*found)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[1], want[1])
    assert found[1].dtype == torch.float32
    assert torch.equal(dense, tiles.values(*want))
