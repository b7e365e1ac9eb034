"""Engines load weights while torch's default dtype is bfloat16."""

import torch

from tk_serving.gemm import tiles
from tk_serving.quant import marlin


def test_scales_of_rows_are_float32_whatever_the_default_is():
    generator = torch.Generator().manual_seed(0)
    codes = marlin.pack_codes(torch.randint(-128, 128, (2, 64, 64), generator=generator, dtype=torch.int8))
    exponents = marlin.pack_exponents(torch.randint(100, 120, (2, 64, 4), generator=generator, dtype=torch.uint8))
    expected = tiles.from_marlin(codes, exponents), tiles.to_marlin(*tiles.from_marlin(codes, exponents))
    values = tiles.values(*expected[0])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tiles.exact(codes, exponents)
        found = tiles.from_marlin(codes, exponents)
        again = tiles.to_marlin(*found)
        seen = tiles.values(*found)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[1].dtype == torch.float32
    for mine, other in zip((*found, *again, seen), (*expected[0], *expected[1], values), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
