"""Packed weight scales and those of the transposes: places, layouts, reuse, messages."""

import pytest
import torch

from tk_serving.config import settings
from tk_serving.quant import batched_transpose_weight_sf


def weight(*shape, block, seed=0):
    *groups, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.randint(-126, 128, (*groups, n // block, k // block), generator=generator).float())


def byte(words, row, block):
    return words[row, block // 4].item() >> (8 * (block % 4)) & 255


@pytest.mark.parametrize("block", [32, 128])
def test_every_byte(block):
    n, k = 256, 640
    sf = weight(n, k, block=block)
    exponents = sf.view(torch.int32) >> 23
    [(sf0, sf1)] = batched_transpose_weight_sf([sf], block, [False], [None])
    assert (tuple(sf0.shape), sf0.stride()) == ((n, -(-k // block // 4)), (1, n))
    assert (tuple(sf1.shape), sf1.stride()) == ((k, -(-n // block // 4)), (1, k))
    for r in (0, 31, 32, 127, 128, 255):
        for c in range(4 * sf0.shape[1]):
            expected = exponents[r // block, c].item() if c < k // block else 0
            assert byte(sf0, r, c) == expected
    for c in (0, 33, 129, 639):
        for r in range(4 * sf1.shape[1]):
            expected = exponents[r, c // block].item() if r < n // block else 0
            assert byte(sf1, c, r) == expected


def test_flag_and_groups():
    sf = weight(3, 128, 256, block=32)
    (plain, flagged) = batched_transpose_weight_sf([sf, sf], 32, [False, True], [None, None])
    assert (tuple(plain[0].shape), plain[0].stride()) == ((3, 128, 2), (256, 1, 128))
    assert (tuple(plain[1].shape), plain[1].stride()) == ((3, 256, 1), (256, 1, 256))
    assert tuple(flagged[1].shape) == (3, 1, 256)
    assert flagged[1].is_contiguous()
    assert torch.equal(flagged[1], plain[1].mT)
    for g in range(3):
        [alone] = batched_transpose_weight_sf([sf[g]], 32, [False], [None])
        assert torch.equal(alone[0], plain[0][g])
        assert torch.equal(alone[1], plain[1][g])


def test_pairs_are_written_again():
    first, second = weight(128, 256, block=128, seed=1), weight(128, 256, block=128, seed=2)
    [pair] = batched_transpose_weight_sf([first], 128, [False], [None])
    [again, fresh] = batched_transpose_weight_sf([second, second], 128, [False, False], [pair, None])
    assert again[0] is pair[0]
    assert again[1] is pair[1]
    assert torch.equal(pair[0], fresh[0])
    assert torch.equal(pair[1], fresh[1])


def test_sign_and_mantissa_are_dropped_and_checks_refuse(monkeypatch):
    sf = torch.full((1, 1), -1.5)
    [(sf0, _)] = batched_transpose_weight_sf([sf], 128, [False], [None])
    assert sf0.unique().tolist() == [127]
    monkeypatch.setattr(settings, "check", True)
    with pytest.raises(ValueError, match=r"sf\[0\]: expected positive powers of two"):
        batched_transpose_weight_sf([sf], 128, [False], [None])


def test_empty_list_and_many_weights():
    assert batched_transpose_weight_sf([], 128, [], []) == []
    many = [weight(128, 128 * (i + 1), block=128, seed=i) for i in range(9)]
    pairs = batched_transpose_weight_sf(many, 128, [False] * 9, [None] * 9)
    for i, (sf0, _) in enumerate(pairs):
        assert byte(sf0, 5, i) == many[i].view(torch.int32)[0, i].item() >> 23


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (ValueError, {"block_size": 64}, "block_size: expected 32 or 128, got 64"),
        (
            ValueError,
            {"sf": [torch.ones(1, 1)]},
            "sf[0]: expected n and k that are positive multiples of 128, got [32, 32]",
        ),
        (TypeError, {"sf": [torch.ones(4, 4).double()]}, "sf[0]: expected dtype float32, got float64"),
        (ValueError, {"sf": [torch.ones(4, 8).mT]}, "sf[0]: expected a contiguous tensor, got strides [1, 8]"),
        (ValueError, {"outs": []}, "outs: expected 1 entries, one for each tensor of sf, got 0"),
        (TypeError, {"outs": [torch.ones(1)]}, "outs[0]: expected None or a pair of tensors, got Tensor"),
        (
            ValueError,
            {"outs": [(torch.zeros(128, 1, dtype=torch.int32), torch.zeros(256, 1, dtype=torch.int32))]},
            "outs[0][0]: expected strides [1, 128], got [1, 1]",
        ),
    ],
)
def test_messages(error, change, message):
    args = {"sf": [torch.ones(4, 4)], "block_size": 32, "transpose_sf1s": [False], "outs": [None]}
    with pytest.raises(error) as caught:
        batched_transpose_weight_sf(**(args | change))
    assert str(caught.value) == f"batched_transpose_weight_sf: {message}"
