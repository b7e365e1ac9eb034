"""FP4 to FP8 with larger blocks: exactness, its limits, layouts, messages."""

import pytest
import torch

from tk_serving.config import settings
from tk_serving.quant import cast_back, per_block_cast_lossless
from tk_serving.quant.scales import pack

NONZERO = 0x22  # 1.0 and 1.0


def fp4(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)


def scales(rows, blocks, low, high, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.randint(low, high + 1, (rows, blocks), generator=generator).float())


@pytest.mark.parametrize(("block", "out_block"), [((1, 32), (128, 128)), ((1, 16), (3, 64)), ((2, 32), (2, 32))])
def test_values_stay_exactly_up_to_a_ratio_of_2_to_14(block, out_block):
    data = fp4(133, 160)
    sf = scales(-(-133 // block[0]), 160 // block[1], -10, 4)
    found = per_block_cast_lossless((data, sf), "e4m3", block, out_block)
    assert torch.equal(cast_back(found, "fp32", out_block), cast_back((data, sf), "fp32", block))


def test_scale_is_2_to_minus_6_of_the_largest():
    sf = torch.tensor([[2.0**3, 2.0**-5, 1.0, 2.0**9]])
    data, out = per_block_cast_lossless((torch.full((1, 64), NONZERO, dtype=torch.int8), sf), "e4m3", (1, 32), (1, 64))
    assert out.tolist() == [[2.0**-3, 2.0**3]]
    assert data.float()[0, ::32].tolist() == [64.0, 0.25, 0.125, 64.0]


def test_smallest_exponents():
    """2^-127 is the scale of exponent 0, in both layouts."""
    sf = torch.tensor([[2.0**-126, 2.0**-126]])
    data, out = per_block_cast_lossless((torch.full((1, 32), NONZERO, dtype=torch.int8), sf), "e4m3", (1, 32), (1, 64))
    assert out.item() == 2.0**-127
    assert data.float().unique().tolist() == [2.0]
    _, packed = per_block_cast_lossless(
        (torch.zeros(1, 32, dtype=torch.int8), sf), "e4m3", (1, 32), (1, 64), True, False, True
    )
    assert packed.item() == 0


def test_zero_codes_are_exact_at_any_scale():
    data = torch.full((1, 32), NONZERO, dtype=torch.int8)
    data[0, :16] = torch.tensor([0x00, 0x08, -128, 0x00] * 4, dtype=torch.int8)
    sf = torch.tensor([[2.0**-100, 2.0**100]])
    values, out = per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 64))
    assert values.float()[0, :32].eq(0).all()
    assert torch.signbit(values.float()[0, :4]).tolist() == [False, False, True, False]
    assert (values.float() * out)[0, 32:].eq(2.0**100).all()


def test_beyond_the_limit_values_are_rounded_and_checks_refuse(monkeypatch):
    data = torch.full((1, 32), 0x33, dtype=torch.int8)  # 1.5
    sf = torch.tensor([[2.0**-15, 1.0]])
    values, out = per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 64))
    assert out.item() == 2.0**-6
    assert values.float()[0, 0].item() == 2 * 2.0**-9  # 1.5 * 2^-9 is a tie
    monkeypatch.setattr(settings, "check", True)
    with pytest.raises(ValueError, match=r"x\[1\]: expected scales within 2\^14 of the largest"):
        per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 64))


def test_mantissa_is_dropped_and_checks_refuse(monkeypatch):
    x = (torch.full((1, 16), NONZERO, dtype=torch.int8), torch.tensor([[1.75]]))
    values, out = per_block_cast_lossless(x, "e4m3", (1, 32), (1, 32))
    assert (values.float() * out).unique().tolist() == [1.0]
    monkeypatch.setattr(settings, "check", True)
    with pytest.raises(ValueError, match=r"x\[1\]: expected positive powers of two"):
        per_block_cast_lossless(x, "e4m3", (1, 32), (1, 32))


def test_layouts():
    data, sf = fp4(70, 672), scales(70, 21, -3, 3)
    plain = per_block_cast_lossless((data, sf), "e4m3", (1, 32), (32, 64))
    packed_in = pack(sf.view(torch.int32) >> 23)
    found, packed = per_block_cast_lossless((data, packed_in), "e4m3", (1, 32), (32, 64), True, False, True)
    assert torch.equal(found.view(torch.uint8), plain[0].view(torch.uint8))
    assert plain[1].shape == (3, 11)
    assert plain[1].stride() == (11, 1)
    assert packed.shape == (3, 3)
    assert packed.stride() == (1, 4)
    exponents = packed.contiguous().view(torch.uint8)
    assert torch.equal(exponents[:, :11].int(), plain[1].view(torch.int32) >> 23)
    assert exponents[:, 11].eq(0).all()
    assert packed.as_strided((3, 4), (4, 1))[:, 3].eq(0).all()


def test_strided_data_and_no_rows():
    data, sf = fp4(5, 128), scales(5, 2, -2, 2)
    found = per_block_cast_lossless((data[:, :32], sf), "e4m3", (1, 32), (1, 64))
    expected = per_block_cast_lossless((data[:, :32].contiguous(), sf), "e4m3", (1, 32), (1, 64))
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    empty = (torch.empty(0, 32, dtype=torch.int8), torch.empty(0, 2))
    found = per_block_cast_lossless(empty, "e4m3", (1, 32), (128, 64), True)
    assert [tuple(t.shape) for t in found] == [(0, 64), (0, 1)]


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (ValueError, {"fmt": "e2m1"}, "fmt: expected 'e4m3', got 'e2m1'"),
        (
            TypeError,
            {"x": (torch.ones(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 2))},
            "x[0]: expected dtype int8, got float8_e4m3fn",
        ),
        (
            TypeError,
            {"x": (torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 2).to(torch.float8_e4m3fn))},
            "x[1]: expected dtype float32 or int32, got float8_e4m3fn",
        ),
        (
            ValueError,
            {"out_block_size": (1, 48)},
            "out_block_size: expected columns that are a power of two, at least 8, got 48",
        ),
        (ValueError, {"out_block_size": (1, 16)}, "out_block_size: expected multiples of (1, 32), got (1, 16)"),
        (
            ValueError,
            {"use_packed_ue8m0": True},
            "use_packed_ue8m0: expected use_tma_aligned_col_major_sf as well, got False",
        ),
        (
            ValueError,
            {"x_block_size": (2, 32), "out_block_size": (2, 32)},
            "x[1]: expected shape [1, 2] (float32 scales of 1 x 2 blocks), got [2, 2]",
        ),
    ],
)
def test_messages(error, change, message):
    args = {
        "x": (torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 2)),
        "fmt": "e4m3",
        "x_block_size": (1, 32),
        "out_block_size": (1, 64),
    }
    with pytest.raises(error) as caught:
        per_block_cast_lossless(**(args | change))
    assert str(caught.value) == f"per_block_cast_lossless: {message}"
