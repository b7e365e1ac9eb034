"""Quantisation of more than 2^31 elements: the last rows of a large call equal the same rows alone, bit for bit."""

import pytest
import torch
from on_device import needs_device, same, tensors

from tk_serving import quant

FAR = 2**31

pytestmark = [*needs_device(40), pytest.mark.large]


def filled(rows, width, last):
    """bfloat16 [rows, width] on the device with ``last`` random rows at its end; the others are zeros."""
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-last:] = torch.randn(last, width, device="cuda")
    return x


def test_l01_swiglu_and_cast():
    x = filled(61690, 34816, 10)
    data, sf = quant.swiglu_forward_and_per_token_cast(x, "e4m3", 128, use_tma_aligned_col_major_sf=True)
    alone = quant.swiglu_forward_and_per_token_cast(x[-10:].clone(), "e4m3", 128, use_tma_aligned_col_major_sf=True)
    same(data[-10:], alone[0])
    same(sf[-10:], alone[1])


@pytest.mark.parametrize("packed", [False, True])
def test_l02_column_major_scales(packed):
    x = filled(524416, 4096, 128)
    flags = {"use_tma_aligned_col_major_sf": True, "round_sf": packed, "use_packed_ue8m0": packed}
    data, sf = quant.per_token_cast(x, "e4m3", 128, **flags)
    alone = quant.per_token_cast(x[-128:].clone(), "e4m3", 128, **flags)
    same(data[-128:], alone[0])
    same(sf[-128:], alone[1])


@pytest.mark.parametrize(
    ("name", "size"), [("per_block_cast", (128, 128)), ("per_channel_cast", 128), ("per_channel_cast_fused", 128)]
)
def test_l02_blocks_of_rows(name, size):
    x = filled(524416, 4096, 128)
    data, sf = getattr(quant, name)(x, "e4m3", size)
    alone = getattr(quant, name)(x[-128:].clone(), "e4m3", size)
    same(data[-128:], alone[0])
    same(sf[-1:], alone[1])


def test_l02_transposed():
    x = filled(524416, 4096, 128)
    data, sf = quant.per_channel_cast_and_transpose(x, "e4m3", 128)
    alone = quant.per_channel_cast_and_transpose(x[-128:].clone(), "e4m3", 128)
    same(data[:, -128:], alone[0])
    same(sf[-1:], alone[1])


def test_l02_cast_back():
    x, sf = filled(524416, 4096, 16).to(torch.float8_e4m3fn), torch.rand(524416, 32, device="cuda")
    found = quant.cast_back((x, sf), "bf16", (1, 128))
    same(found[-16:], quant.cast_back((x[-16:].clone(), sf[-16:].clone()), "bf16", (1, 128)))


def test_l03_swiglu_forward():
    x = filled(80000, 36864, 8)
    same(quant.swiglu_forward(x, "bf16")[-8:], quant.swiglu_forward(x[-8:].clone(), "bf16"))


def test_l03_swiglu_backward():
    x, grad = filled(80000, 32768, 8), filled(80000, 16384, 8)  # the widest rows that there is a kernel for
    weights = torch.rand(80000, device="cuda")
    found = quant.swiglu_backward(x, grad, topk_weights=weights)
    alone = quant.swiglu_backward(x[-8:].clone(), grad[-8:].clone(), topk_weights=weights[-8:].clone())
    for part, want in zip(tensors(found), tensors(alone), strict=True):
        same(part[-8:], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_l06_scale_column_past_2_31(dtype):
    """Column 32 of the scales starts 2^31 elements behind column 0."""
    buffer = torch.empty(FAR + 2**20, dtype=dtype, device="cuda")
    sf = buffer.as_strided((4, 33), (1, 2**26))
    columns = 33 if dtype == torch.float32 else 33 * 4
    sf.copy_(
        torch.rand(4, 33, device="cuda")
        if dtype == torch.float32
        else torch.randint(0x01010101, 0x7E7E7E7E, (4, 33), dtype=torch.int32, device="cuda")
    )
    x = torch.randn(4, columns * 128, device="cuda").to(torch.float8_e4m3fn)
    same(quant.cast_back((x, sf), "fp32", (1, 128)), quant.cast_back((x, sf.contiguous()), "fp32", (1, 128)))


@pytest.mark.parametrize("stride", [FAR, FAR // 2])
def test_l08_row_stride_past_2_31(stride):
    rows = FAR // stride + 1
    buffer = torch.empty(FAR + 2**20, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((rows, 4096), (stride, 1))
    x.copy_(torch.randn(rows, 4096, device="cuda"))
    for found, want in zip(
        quant.per_token_cast(x, "e4m3", 128), quant.per_token_cast(x.contiguous(), "e4m3", 128), strict=True
    ):
        same(found, want)


@pytest.mark.parametrize("name", ["per_token_cast", "per_channel_cast"])
def test_l08_slice_of_wide_rows(name):
    """Column 2048 of the last row of the buffer is its element 2^31; the slice lies behind it."""
    buffer = torch.zeros(139811, 15360, dtype=torch.bfloat16, device="cuda")
    x = buffer[:, -512:]
    x[-35:] = torch.randn(35, 512, device="cuda")  # 139811 % 128
    data, sf = getattr(quant, name)(x, "e4m3", 128)
    alone = getattr(quant, name)(x[-35:].contiguous(), "e4m3", 128)
    same(data[-35:], alone[0])
    same(sf[-alone[1].shape[0] :], alone[1])


def test_l09_norm():
    x = filled(8388624, 256, 16)
    weight = torch.rand(256, device="cuda").bfloat16()
    found, alone = (quant.norm_forward(rows, weight, 1e-6, with_rstd=True) for rows in (x, x[-16:].clone()))
    for part, want in zip(tensors(found), tensors(alone), strict=True):
        same(part[-16:], want)


def test_l09_norm_and_cast():
    x = filled(8388624, 256, 16)
    weight = torch.rand(256, device="cuda").bfloat16()
    found, alone = (
        quant.norm_forward_and_per_token_cast(rows, weight, 1e-6, "e4m3", 128) for rows in (x, x[-16:].clone())
    )
    for part, want in zip(tensors(found), tensors(alone), strict=True):
        same(part[-16:], want)
