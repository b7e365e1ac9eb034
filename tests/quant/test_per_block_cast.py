"""Casts with one scale for each block: scales, edges, layouts, given scales, messages."""

import pytest
import torch

from tk_serving.compare import diff
from tk_serving.quant import (
    cast_back,
    per_block_cast,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
    per_token_cast,
)

NAN, INF = float("nan"), float("inf")


def codes(data):
    return data.view(torch.uint8)


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [(32, 32), (32, 128), (128, 32), (128, 128)])
def test_each_block_has_the_scale_of_its_largest_element(block):
    x = torch.full((300, 272), 0.5)
    x[299, 271], x[31, 0], x[32, 127] = -896.0, 448.0, 3.5
    data, sf = per_block_cast(x, "e4m3", block, round_sf=True)
    assert sf.shape == (-(-300 // block[0]), -(-272 // block[1]))
    for i, j in torch.cartesian_prod(*(torch.arange(n) for n in sf.shape)).tolist():
        part = x[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].abs().max().item()
        assert sf[i, j].item() == {0.5: 2.0**-9, 896.0: 2.0, 448.0: 1.0, 3.5: 2.0**-7}[part]
    assert torch.equal(cast_back((data, sf), "fp32", block), x)


def test_one_tall_block_equals_the_token_cast_of_its_transposed_row():
    """The rule of the scales is that of per_token_cast: quotients MAX / amax, not 1 / sf."""
    x = matrix(128, 128, seed=1)
    data, sf = per_block_cast(x, "e4m3", (128, 128))
    row, row_sf = per_token_cast(x.reshape(1, -1), "e4m3", 128 * 128)
    assert torch.equal(sf, row_sf)
    assert torch.equal(codes(data).view(-1), codes(row).view(-1))


def test_nan_and_infinity():
    x = torch.ones(32, 32)
    x[0, 0] = NAN
    _, sf = per_block_cast(x, "e4m3", (32, 32))
    assert sf.item() == torch.tensor(1.0).div(torch.tensor(448.0)).item()
    x[0, 1] = -INF
    data, sf = per_block_cast(x, "e4m3", (32, 32))
    assert sf.item() == torch.tensor(3.4028234663852886e38).div(torch.tensor(448.0)).item()
    assert codes(data)[0, :3].tolist() == [0x7F, 0xFE, 0x00]


def test_zero_block_has_the_floor_scale():
    for fmt, floor in (("e4m3", torch.tensor(1e-4) / torch.tensor(448.0)), ("e2m1", torch.tensor(2.0**-126))):
        data, sf = per_block_cast(torch.zeros(40, 48), fmt, (32, 32))
        assert sf.eq(floor).all()
        assert codes(data).eq(0).all()


@pytest.mark.parametrize(("fmt", "limit"), [("e4m3", 1e-3), ("e2m1", 2e-2)])
def test_round_trip(fmt, limit):
    x = matrix(100, 208, seed=2)
    assert diff(cast_back(per_block_cast(x, fmt, (32, 32)), "fp32", (32, 32)), x) < limit


def test_layouts():
    x = matrix(150, 688, seed=3)
    data, row = per_block_cast(x, "e4m3", (32, 128), round_sf=True)
    _, column = per_block_cast(x, "e4m3", (32, 128), True, True)
    again, packed = per_block_cast(x, "e4m3", (32, 128), True, True, True)
    assert row.stride() == (6, 1)
    assert column.stride() == (1, 8)
    assert torch.equal(column, row)
    assert packed.shape == (5, 2)
    assert packed.stride() == (1, 8)
    assert torch.equal(codes(again), codes(data))
    exponents = packed.contiguous().view(torch.uint8)
    assert torch.equal(exponents[:, :6], (row.view(torch.int32) >> 23).to(torch.uint8))
    assert exponents[:, 6:].eq(0).all()
    assert packed.as_strided((2, 8), (8, 1))[:, 5:].eq(0).all()
    assert column.as_strided((6, 8), (8, 1))[:, 5:].eq(0).all()


def test_scales_alone():
    x = matrix(150, 688, seed=4).bfloat16()
    for flags in ((False, False, False), (True, False, False), (True, True, True)):
        _, sf = per_block_cast(x, "e2m1", (128, 32), *flags)
        alone = per_block_cast_with_sf_only(x, "e2m1", (128, 32), *flags)
        assert torch.equal(alone, sf)
        assert alone.stride() == sf.stride()


def test_given_scales_of_any_layout():
    x = matrix(70, 144, seed=5)
    data, row = per_block_cast(x, "e4m3", (32, 32), round_sf=True)
    for flags in ((True, True, False), (True, True, True)):
        sf = per_block_cast_with_sf_only(x, "e4m3", (32, 32), *flags)
        assert torch.equal(codes(per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), sf, *flags)), codes(data))
    sliced = torch.stack([row, row * 3])[0]
    assert torch.equal(codes(per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), sliced)), codes(data))


def test_given_scales_divide_and_saturate():
    x = torch.zeros(33, 32)
    x[0, :4] = torch.tensor([3.0, -1e4, NAN, 1.0])
    x[32, 0] = 5.0
    found = codes(per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), torch.tensor([[0.3], [0.0]])))
    expected = (x[0, :1] * (torch.ones(1) / torch.tensor([0.3]))).to(torch.float8_e4m3fn)
    assert found[0, :3].tolist() == [codes(expected).item(), 0xFE, 0x7F]
    assert found[32].eq(0).all()


def test_preallocated():
    x = matrix(130, 160, seed=6)
    expected = per_block_cast(x, "e4m3", (32, 32), True)
    out = (torch.empty_like(expected[0]), torch.empty(5, 8).as_strided((5, 5), (1, 8)))
    found = per_block_cast(x, "e4m3", (32, 32), True, out=out)
    assert found[0] is out[0]
    assert found[1] is out[1]
    assert torch.equal(codes(out[0]), codes(expected[0]))
    assert torch.equal(out[1], expected[1])
    sf = torch.empty(5, 5)
    assert per_block_cast_with_sf_only(x, "e4m3", (32, 32), out=sf) is sf
    assert torch.equal(sf, expected[1])
    data = torch.empty_like(expected[0])
    assert per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), sf, out=data) is data


def test_no_rows():
    data, sf = per_block_cast(torch.empty(0, 256), "e2m1", (32, 128), True, True, True)
    assert data.shape == (0, 128)
    assert sf.shape == (0, 1)
    assert sf.stride(0) == 1
    assert per_block_cast_with_precomputed_sf(torch.empty(0, 256), "e4m3", (32, 32), torch.empty(0, 8)).shape == (
        0,
        256,
    )


@pytest.mark.parametrize(
    ("error", "args", "flags", "message"),
    [
        (
            TypeError,
            (torch.ones(2, 32).half(), "e4m3", (32, 32)),
            {},
            "x: expected dtype bfloat16 or float32, got float16",
        ),
        (ValueError, (torch.ones(2, 32), "e5m6", (32, 32)), {}, "fmt: expected 'e4m3' or 'e2m1', got 'e5m6'"),
        (
            ValueError,
            (torch.ones(2, 24), "e4m3", (32, 32)),
            {},
            "x: expected H that is a positive multiple of 16, got 24",
        ),
        (
            ValueError,
            (torch.ones(2, 64)[:, :32], "e4m3", (32, 32)),
            {},
            "x: expected a contiguous tensor, got strides [64, 1]",
        ),
        (
            ValueError,
            (torch.ones(2, 32), "e4m3", (64, 32)),
            {},
            "block_size: expected (rows, columns), each 32 or 128, got (64, 32)",
        ),
        (
            ValueError,
            (torch.ones(2, 32), "e4m3", (32, 32)),
            {"use_packed_ue8m0": True},
            "use_packed_ue8m0: expected use_tma_aligned_col_major_sf as well, got False",
        ),
        (
            ValueError,
            (torch.ones(2, 32), "e4m3", (32, 32)),
            {"use_tma_aligned_col_major_sf": True, "use_packed_ue8m0": True},
            "use_packed_ue8m0: expected round_sf as well, got False",
        ),
        (
            ValueError,
            (torch.ones(2, 32), "e4m3", (32, 32)),
            {"out": (torch.empty(2, 32, dtype=torch.float8_e4m3fn), torch.empty(2, 1))},
            "out[1]: expected shape [1, 1], got [2, 1]",
        ),
    ],
)
def test_messages(error, args, flags, message):
    with pytest.raises(error) as caught:
        per_block_cast(*args, **flags)
    assert str(caught.value) == f"per_block_cast: {message}"


def test_messages_of_given_scales():
    x = torch.ones(40, 160)
    with pytest.raises(
        ValueError, match=r"sf: expected shape \[2, 2\] \(float32 scales of 2 x 2 blocks\), got \[2, 5\]"
    ):
        per_block_cast_with_precomputed_sf(x, "e4m3", (32, 128), torch.ones(2, 5))
    with pytest.raises(TypeError, match="sf: expected dtype int32, got float32"):
        per_block_cast_with_precomputed_sf(x, "e4m3", (32, 128), torch.ones(2, 2), True, True, True)
    with pytest.raises(TypeError, match=r"x: expected a torch\.Tensor, got tuple"):
        per_block_cast((x, x), "e4m3", (32, 32))
