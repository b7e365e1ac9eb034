"""Every FP4 code with every exponent through the kernel: a product with single ones shows the weights themselves."""

import pytest
import torch

from tk_serving.gemm import grouped_gemm_fp8_fp4, tiles
from tk_serving.gemm.grouped_gemm_fp8_fp4 import HALF, SHAPES

OPERATOR = grouped_gemm_fp8_fp4.operator


@pytest.mark.parametrize("shape", [*SHAPES, *HALF], ids=lambda shape: str(shape.width))
def test_weights_pass_through_exactly(shape):
    m, k = 128 * shape.subtiles, 128
    generator = torch.Generator().manual_seed(shape.width)
    codes = torch.arange(256, dtype=torch.uint8).repeat(m * k // 2 // 256).view(1, m, k // 2).view(torch.int8)
    exponents = torch.randint(0, tiles.REACH + 1, (1, m, k // 32), generator=generator, dtype=torch.uint8)
    row_sf = torch.exp2(torch.randint(-20, 20, (1, m), generator=generator).float())
    weight = tiles.pack(codes, exponents), row_sf
    x = torch.eye(k).to(torch.float8_e4m3fn), torch.ones(k, 1)
    region = torch.tensor([0], dtype=torch.int32), torch.tensor([k], dtype=torch.int32)
    rows = min(shape.up_to, 1e6)
    assert OPERATOR.plan(x, weight, *region, rows, None).launches[0].config == shape.config
    found = OPERATOR.call("simulator", x, weight, *region, rows)
    assert torch.equal(found, tiles.values(*weight)[0].T.bfloat16())
