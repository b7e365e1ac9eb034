"""FP4 in Marlin's layout to FP8 blocks: the layout, exactness, its limits, messages."""

import numpy as np
import pytest
import torch

from tk_serving.config import settings
from tk_serving.quant import cast_back, marlin, per_block_cast_lossless, per_block_cast_lossless_from_marlin
from tk_serving.quant.per_block_cast_lossless import RAISE
from tk_serving.quant.per_block_cast_lossless_from_marlin import exact
from tk_serving.quant.scales import of_exponents


def raw(experts, n, k, low=110, high=124, seed=0):
    """Codes int8 [E, N, K / 2] and exponents uint8 [E, N, K / 32], as in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (experts, n, k // 2), generator=generator, dtype=torch.int8)
    return codes, torch.randint(low, high + 1, (experts, n, k // 32), generator=generator, dtype=torch.uint8)


def repacked(codes, exponents):
    return marlin.pack_codes(codes), marlin.pack_exponents(exponents)


def marlin_permutation():
    """Where each of 1024 codes (16 columns by 64 rows, in tiles of 16 x 16) goes, from the published construction."""
    places = []
    for lane in range(32):
        column = lane // 4
        block = [
            16 * row + column + 8 * half
            for half in (0, 1)
            for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1)
        ]
        places += [place + 256 * tile for tile in range(4) for place in block]
    return torch.tensor(places).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)


def test_codes_lie_where_the_repacking_kernel_puts_them():
    n, k = 128, 64
    values = torch.randint(0, 16, (k, n), generator=torch.Generator().manual_seed(1))
    tiles = values.view(k // 16, 16, n // 16, 16).permute(0, 2, 1, 3).reshape(k // 16, n * 16)
    ordered = tiles.view(-1, 1024)[:, marlin_permutation()].view(k // 16, -1, 8).numpy().astype(np.uint32)
    words = sum(ordered[..., i] << np.uint32(4 * i) for i in range(8)).view(np.int32)
    codes = (values.T[:, 0::2] | values.T[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    assert torch.equal(marlin.pack_codes(codes), torch.from_numpy(words))
    assert torch.equal(marlin.unpack_codes(torch.from_numpy(words)), codes)


def test_scales_lie_where_the_repacking_puts_them():
    _, exponents = raw(1, 128, 64, 0, 255)
    by_lane = [i + 8 * j for i in range(8) for j in range(8)]
    stored = exponents[0].T.reshape(-1, 64)[:, by_lane].reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(2, 128)
    assert torch.equal(marlin.pack_exponents(exponents)[0], stored)
    assert torch.equal(marlin.unpack_exponents(stored), exponents[0])


def test_extreme_exponents_are_those_of_the_blocks():
    _, exponents = raw(2, 256, 384)
    blocks = exponents.view(2, 2, 128, 3, 4).int()
    least, most = marlin.extreme_exponents(marlin.pack_exponents(exponents))
    assert torch.equal(least, blocks.amin(dim=(2, 4)))
    assert torch.equal(most, blocks.amax(dim=(2, 4)))


def test_same_bytes_and_scales_as_from_the_checkpoint():
    codes, exponents = raw(3, 256, 384, 100, 130)
    data, sf = repacked(codes, exponents)
    out_sf = marlin.block_scales(sf, RAISE)
    found = per_block_cast_lossless_from_marlin((data, sf), out_sf)
    for e in range(3):
        scale = of_exponents(exponents[e].int())
        values, scales = per_block_cast_lossless((codes[e], scale), "e4m3", (1, 32), (128, 128))
        assert torch.equal(found[e].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(out_sf[e], scales)


@pytest.mark.parametrize(("low", "high"), [(110, 124), (0, 14), (241, 254)])
def test_values_stay_exactly_up_to_a_ratio_of_2_to_14(low, high):
    codes, exponents = raw(1, 128, 256, low, high)
    data, sf = repacked(codes, exponents)
    assert exact(data, sf)
    out_sf = marlin.block_scales(sf, RAISE)
    found = per_block_cast_lossless_from_marlin((data, sf), out_sf)
    wanted = cast_back((codes[0], of_exponents(exponents[0].int())), "fp32", (1, 32))
    assert torch.equal(cast_back((found[0], out_sf[0]), "fp32", (128, 128)), wanted)


def test_exactness_looks_at_each_expert_and_block():
    codes, exponents = raw(2, 256, 256, 120, 122)
    exponents[1, 200, 7] = 122 - 15
    data, sf = repacked(codes, exponents)
    assert exact(data[:1], sf[:1])
    assert not exact(data, sf)
    codes[1, 200, 7 * 16 : 8 * 16] = -128 + 8  # two zeros of either sign in a byte
    assert exact(*repacked(codes, exponents))


def test_preallocated_result_is_returned():
    codes, exponents = raw(1, 128, 128)
    data, sf = repacked(codes, exponents)
    out = torch.empty(1, 128, 128, dtype=torch.float8_e4m3fn)
    assert per_block_cast_lossless_from_marlin((data, sf), marlin.block_scales(sf, RAISE), out) is out


def test_messages():
    codes, exponents = raw(1, 128, 128)
    data, sf = repacked(codes, exponents)
    out_sf = marlin.block_scales(sf, RAISE)
    name = "per_block_cast_lossless_from_marlin"
    with pytest.raises(TypeError, match=rf"{name}: x\[0\]"):
        per_block_cast_lossless_from_marlin((data.float(), sf), out_sf)
    with pytest.raises(ValueError, match=rf"{name}: x\[0\]: expected 2 N with N a multiple of 128, got 128"):
        per_block_cast_lossless_from_marlin((data[..., :128].contiguous(), sf), out_sf)
    with pytest.raises(ValueError, match=rf"{name}: out_sf"):
        per_block_cast_lossless_from_marlin((data, sf), out_sf[:, :, :0])
    with pytest.raises(ValueError, match=rf"{name}: out: "):
        per_block_cast_lossless_from_marlin((data, sf), out_sf, torch.empty(1, 128, 256, dtype=torch.float8_e4m3fn))


def test_checks_refuse_other_scales_and_a_wider_range(monkeypatch):
    monkeypatch.setattr(settings, "check", True)
    codes, exponents = raw(1, 128, 128)
    data, sf = repacked(codes, exponents)
    with pytest.raises(ValueError, match="out_sf"):
        per_block_cast_lossless_from_marlin((data, sf), marlin.block_scales(sf, RAISE) * 2)
    exponents[0, 0, 0] = 100
    data, sf = repacked(codes, exponents)
    with pytest.raises(ValueError, match="a wider range"):
        per_block_cast_lossless_from_marlin((data, sf), marlin.block_scales(sf, RAISE))
