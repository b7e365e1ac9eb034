"""Casts with one scale for each column: public faults, blocks, gathering, packing, transposition, messages."""

import pytest
import torch

from tk_serving.quant import (
    per_channel_cast,
    per_channel_cast_and_transpose,
    per_channel_cast_fused,
    per_token_cast,
    swiglu_forward,
    swiglu_forward_and_per_channel_cast_and_transpose,
)


def codes(data):
    return data.view(torch.uint8)


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def by_columns(x, rows, round_sf=False):
    """The same cast, from per_token_cast of the transposed blocks of rows."""
    parts = [
        per_token_cast(block.t().contiguous(), "e4m3", len(block), None, False, round_sf) for block in padded(x, rows)
    ]
    data = torch.cat([codes(data).t() for data, _ in parts])[: len(x)]
    return data, torch.cat([sf.t() for _, sf in parts])


def padded(x, rows):
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % rows)).split(rows)


def test_q17_rows_past_the_count_do_not_exist():
    counts, x = (3, 0, 5), torch.full((3, 8, 128), 1e9)
    positions = torch.full((3, 32), -1, dtype=torch.int32)
    for group, count in enumerate(counts):
        x[group, :count] = 1.0
        positions[group, :count] = torch.arange(8 * group, 8 * group + count, dtype=torch.int32)
    data, sf = per_channel_cast_fused(x.view(24, 128), "e4m3", 32, pos_to_token=positions.view(-1))
    assert sf[[0, 2]].view(torch.int32).unique().tolist() == [0x3B124925]
    rows = codes(data).view(3, 32, 128)
    for group, count in enumerate(counts):
        assert not rows[group, count:].any()
        assert (rows[group, :count] == 0x7E).all()


def test_q19_rows_past_the_end_do_not_exist():
    x = torch.ones(2, 128)
    x[0] = 1e4
    data, sf = per_channel_cast_fused(x, "e4m3", 128, pos_to_token=i32(*[1] * 16))
    assert (data.shape, sf.shape) == ((16, 128), (1, 128))
    assert torch.equal(sf, torch.ones(1, 128) / torch.full((1, 128), 448.0))
    assert codes(data).unique().tolist() == [0x7E]


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("rows", [32, 128])
def test_blocks(rows, round_sf):
    x = made(140, 48)
    data, sf = per_channel_cast(x, "e4m3", rows, round_sf)
    expected = by_columns(x, rows, round_sf)
    assert torch.equal(codes(data), expected[0])
    assert torch.equal(sf, expected[1])
    assert sf.is_contiguous()


def test_known_block():
    """amax 3 in one column: sf 3 / 448 and codes of 448, 144 (the example of the format), -15, 0."""
    x = torch.zeros(4, 16)
    x[:, 5] = torch.tensor([3.0, 1.0, -0.1, 0.0])
    data, sf = per_channel_cast(x, "e4m3", 128)
    assert codes(data)[:, 5].tolist() == [0x7E, 0x71, 0xD7, 0x00]
    assert abs(sf[0, 5].item() - 0.0066964286) < 1e-9
    assert abs(sf[0, 0].item() - 2.2321429e-07) < 1e-13
    data, sf = per_channel_cast(x, "e4m3", 128, True)
    assert codes(data)[:, 5].tolist() == [0x7C, 0x70, 0xD5, 0x00]
    assert sf[0, [5, 0]].tolist() == [2.0**-7, 2.0**-22]


def test_packed_along_the_blocks_of_rows():
    x = made(170, 32)
    sf = per_channel_cast(x, "e4m3", 32, True)[1]
    packed = per_channel_cast(x, "e4m3", 32, True, use_packed_ue8m0=True)[1]
    assert (packed.shape, packed.dtype) == ((2, 32), torch.int32)
    exponents = sf.view(torch.int32) >> 23
    for block in range(8):
        byte = packed[block // 4] >> (8 * (block % 4)) & 255
        assert torch.equal(byte, exponents[block] if block < 6 else torch.zeros_like(byte))


@pytest.mark.parametrize("npc", [32, 128])
def test_quantised_input_is_dequantised_first(npc):
    x = per_token_cast(made(40, 144), "e4m3", npc)
    values = x[0].float() * x[1].repeat_interleave(npc, dim=1)[:, :144]
    found = per_channel_cast(x, "e4m3", 32, num_per_channels=npc)
    expected = per_channel_cast(values, "e4m3", 32)
    assert torch.equal(codes(found[0]), codes(expected[0]))
    assert torch.equal(found[1], expected[1])


def test_gathered_rows():
    x = made(9, 64)
    positions = i32(3, -1, 3, 0, 9, -5, 8)
    rows = torch.stack([x[p] if 0 <= p < 9 else torch.zeros(64) for p in positions.tolist()])
    found, expected = (
        per_channel_cast_fused(x, "e4m3", 128, pos_to_token=positions),
        per_channel_cast(rows, "e4m3", 128),
    )
    assert torch.equal(codes(found[0]), codes(expected[0]))
    assert torch.equal(found[1], expected[1])
    plain = per_channel_cast_fused(x, "e4m3", 128)
    assert torch.equal(codes(plain[0]), codes(per_channel_cast(x, "e4m3", 128)[0]))


def test_a_block_without_tokens():
    nothing = torch.full((130,), -1, dtype=torch.int32)
    nothing[128:] = 0
    data, sf = per_channel_cast_fused(torch.full((1, 16), 7.0), "e4m3", 128, True, pos_to_token=nothing)
    assert sf[0].unique().tolist() == [2.0**-22]
    assert not bool(codes(data)[:128].any())
    assert sf[1].unique().tolist() == [2.0**-6]


@pytest.mark.parametrize("rows", [32, 128])
def test_transposed(rows):
    x = made(144, 48).bfloat16()
    data, sf = per_channel_cast(x, "e4m3", rows)
    turned, same = per_channel_cast_and_transpose(x, "e4m3", rows)
    assert (turned.shape, turned.is_contiguous()) == ((48, 144), True)
    assert torch.equal(codes(turned), codes(data).t())
    assert torch.equal(same, sf)


@pytest.mark.parametrize("clamp", [None, 1.0])
def test_swiglu_is_rounded_before_the_cast(clamp):
    x = (made(48, 128) * 2).bfloat16()
    y = swiglu_forward(x, "bf16", clamp_value=clamp)
    expected = per_channel_cast(y, "e4m3", 32, True)
    data, sf = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32, True, True, clamp)
    assert torch.equal(codes(data), codes(expected[0]))
    assert torch.equal(sf, expected[1])
    turned = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32, True, swiglu_clamp_value=clamp)
    assert torch.equal(codes(turned[0]), codes(data).t())
    assert torch.equal(turned[1], sf)


def test_no_rows():
    data, sf = per_channel_cast(torch.empty(0, 32), "e4m3", 128)
    assert (data.shape, sf.shape) == ((0, 32), (0, 32))
    data, sf = per_channel_cast_and_transpose(torch.empty(0, 32, dtype=torch.bfloat16), "e4m3", 128)
    assert (data.shape, sf.shape) == ((32, 0), (0, 32))


X = torch.ones(16, 64)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: per_channel_cast(X, "e2m1", 128), "fmt: expected 'e4m3', got 'e2m1'"),
        (ValueError, lambda: per_channel_cast(X, "e4m3", 64), "num_per_tokens: expected 32 or 128, got 64"),
        (ValueError, lambda: per_channel_cast(X[:, :24], "e4m3", 128), "x: expected H that is"),
        (ValueError, lambda: per_channel_cast(X, "e4m3", 128, num_per_channels=128), "num_per_channels: expected None"),
        (ValueError, lambda: per_channel_cast(X, "e4m3", 128, use_packed_ue8m0=True), "use_packed_ue8m0: expected"),
        (TypeError, lambda: per_channel_cast_fused(X, "e4m3", 128, pos_to_token=torch.zeros(2)), "pos_to_token: "),
        (TypeError, lambda: per_channel_cast_and_transpose(X, "e4m3", 128), "x: expected dtype bfloat16, got float32"),
        (
            ValueError,
            lambda: per_channel_cast_and_transpose(X[:5].bfloat16(), "e4m3", 128),
            "x: expected T that is a multiple of 16, got 5",
        ),
        (
            ValueError,
            lambda: swiglu_forward_and_per_channel_cast_and_transpose(X.bfloat16(), "e4m3", 128),
            "x: expected 2 H columns, H a multiple of 64, got 64",
        ),
    ],
)  # fmt: skip
def test_messages(error, call, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
