"""Dequantisation of blocks and of rows."""

import pytest
import torch

from tk_serving.quant import cast_back, per_token_cast_back, per_token_cast_with_precomputed_sf, scales

E4M3 = torch.float8_e4m3fn


def data(*codes, width=16):
    found = torch.zeros(1, width, dtype=torch.uint8)
    found[0, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    return found


def test_product_in_float32_then_one_rounding():
    x = (data(0x7E, 0x71, 0xD7).view(E4M3), torch.tensor([[0.0066964286]]))
    product = torch.tensor([448.0, 144.0, -15.0]) * x[1][0]
    assert torch.equal(cast_back(x, "fp32", (1, 16))[0, :3], product)
    assert torch.equal(cast_back(x, "bf16", (1, 16))[0, :3], product.bfloat16())


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_nan_codes_and_signed_zero(fmt):
    found = cast_back((data(0x7F, 0xFF, 0x80).view(E4M3), torch.ones(1, 1)), fmt, (1, 16))[0]
    assert found[:2].isnan().all()
    assert torch.signbit(found[2])


def test_q04_scales_are_used_as_they_are():
    sf = torch.tensor([[0x3B124925]], dtype=torch.int32).view(torch.float32)  # 1/448, no power of two
    found = cast_back((torch.full((1, 16), 448.0).to(E4M3), sf), "fp32", (1, 16))
    assert found.unique().item() == 1.0
    data = per_token_cast_with_precomputed_sf(torch.ones(1, 16), "e4m3", 16, sf)
    assert data.view(torch.uint8).unique().tolist() == [0x7E]


def test_q09_ends_of_the_exponent_range():
    x = torch.full((2, 16), 1.0).to(E4M3)
    sf = torch.tensor([[0], [255]], dtype=torch.int32)
    found = cast_back((x, sf), "fp32", (1, 16))
    assert found[0].unique().item() == 2.0**-127
    assert found[1].isnan().all()


def test_q13_nan_scale_stays_nan_in_bf16():
    sf = torch.tensor([[0x7FFF8C22]], dtype=torch.int32).view(torch.float32)
    found = cast_back((torch.ones(1, 16).to(E4M3), sf), "bf16", (1, 16))
    assert found.isnan().all()


def test_blocks_cut_by_both_edges():
    x = torch.ones(5, 48).to(E4M3)
    sf = torch.arange(1.0, 7.0).view(3, 2)
    expected = sf.repeat_interleave(2, 0)[:5].repeat_interleave(32, 1)[:, :48]
    assert torch.equal(cast_back((x, sf), "fp32", (2, 32)), expected)


@pytest.mark.parametrize("layout", [scales.ROW, scales.COLUMN, scales.PACKED, scales.E4M3, scales.E4M3_COLUMN])
@pytest.mark.parametrize("tokens", [1, 3])
def test_scale_layouts(layout, tokens):
    sf = torch.exp2(torch.arange(tokens * 5).remainder(9).float() - 4).view(tokens, 5)
    x = torch.full((tokens, 144), 1.5).to(E4M3)
    expected = 1.5 * sf.repeat_interleave(32, 1)[:, :144]
    assert torch.equal(cast_back((x, scales.lay_out(sf, layout)), "fp32", (1, 32)), expected)


def test_transposed_and_sliced_scales():
    sf = torch.rand(4, 6)
    x = torch.ones(6, 64).to(E4M3)
    assert torch.equal(cast_back((x, sf.t()), "fp32", (1, 16)), sf.t().repeat_interleave(16, 1))
    assert torch.equal(cast_back((x[:4, :48], sf[:, ::2]), "fp32", (1, 16)), sf[:, ::2].repeat_interleave(16, 1))


def test_e2m1_and_e5m6():
    found = cast_back(
        (data(0xA1, 0x64, 0x78, 0x80, width=8).view(torch.int8), torch.full((1, 1), 2.0)), "fp32", (1, 16)
    )
    assert found[0, :8].tolist() == [1.0, -2.0, 4.0, 8.0, -0.0, 12.0, 0.0, -0.0]
    packed = torch.tensor([list(bytes.fromhex("42000c3c04454004bf672e60"))], dtype=torch.uint8)
    found = cast_back((packed, torch.ones(1, 1)), "fp32", (1, 8), "e5m6")
    assert found[0].tolist() == [1.0, -2.0, 3.0, 4.0, 5.0, 6.0, 0.099609375, 65024.0]


def test_rows_are_blocks_of_one_row():
    x = (torch.randn(3, 96).to(E4M3), torch.rand(3, 3))
    assert torch.equal(per_token_cast_back(x, "bf16", 32), cast_back(x, "bf16", (1, 32)))


def test_row_strided_data_and_no_rows():
    x = torch.randn(4, 128).to(E4M3)
    sf = torch.rand(4, 2)
    assert torch.equal(
        cast_back((x[:, :32], sf), "fp32", (1, 16)), cast_back((x[:, :32].contiguous(), sf), "fp32", (1, 16))
    )
    assert cast_back((x[:0], torch.empty(0, 4)), "bf16", (1, 32)).shape == (0, 128)


E5M6 = torch.zeros(1, 24, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "args", "message"),
    [
        (
            TypeError,
            ((E5M6, torch.ones(1, 1)), "bf16", (1, 16)),
            "x[0]: expected dtype float8_e4m3fn or int8, got uint8",
        ),
        (
            TypeError,
            ((torch.zeros(1, 16).to(E4M3), torch.ones(1, 1)), "bf16", (1, 16), "e5m6"),
            "x[0]: expected dtype uint8, got float8_e4m3fn",
        ),
        (ValueError, ((E5M6, torch.ones(1, 1)), "bf16", (1, 16), "e4m4"), "x_special_fmt: expected 'e5m6', got 'e4m4'"),
        (ValueError, ((E5M6, torch.ones(1, 1)), "fp16", (1, 16), "e5m6"), "fmt: expected 'bf16' or 'fp32', got 'fp16'"),
        (
            ValueError,
            ((E5M6[:, :20], torch.ones(1, 1)), "bf16", (1, 16), "e5m6"),
            "x[0]: expected a last dimension that is a positive multiple of 12, got 20",
        ),
        (
            ValueError,
            ((E5M6, torch.ones(1, 2)), "bf16", (1, 16), "e5m6"),
            "x[1]: expected shape [1, 1] (float32 scales of 1 x 1 blocks), got [1, 2]",
        ),
        (TypeError, (E5M6, "bf16", (1, 16), "e5m6"), "x: expected a (data, sf) pair of tensors, got Tensor"),
    ],
)
def test_messages(error, args, message):
    with pytest.raises(error) as caught:
        cast_back(*args)
    assert str(caught.value) == f"cast_back: {message}"
