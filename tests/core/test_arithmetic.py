"""The fused multiply-add of the references, against exact rational arithmetic."""

from fractions import Fraction

import pytest
import torch

from tk_serving.arithmetic import fma


def nearest_float32(value: Fraction) -> float:
    """The float32 nearest to an exact value, ties to even."""
    guess = torch.tensor(float(value), dtype=torch.float64).float()
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    near = [torch.nextafter(guess, down), guess, torch.nextafter(guess, up)]

    def rank(candidate: torch.Tensor) -> tuple[Fraction, int]:
        return abs(Fraction(float(candidate)) - value), int(candidate.view(torch.int32)) & 1

    return float(min(near, key=rank))


def test_single_rounding():
    """2^24 (1 + 2^-23) + 2^-30: rounding the sum twice would lose the small addend at the tie."""
    a = torch.tensor([1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-12)])
    c = torch.tensor([2.0**-60, -(2.0**-60), 0.0])
    # The product 1 + 2^-11 + 2^-24 lies midway between two float32 values.
    assert fma(a, a.abs(), c).tolist() == [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11, -(1 + 2.0**-11)]


@pytest.mark.parametrize("scale", [1.0, 2.0**-24, 2.0**-140])
def test_equals_exact_arithmetic(scale):
    generator = torch.Generator().manual_seed(1)
    a, b, c = torch.randn(3, 400, generator=generator)
    c = c * scale
    got = fma(a, b, c)
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert got.tolist() == [nearest_float32(value) for value in exact]


def test_non_finite():
    inf, nan = torch.inf, torch.nan
    a, b, c = (
        torch.tensor([inf, inf, 0.0, 2.0, 3e38]),
        torch.tensor([1.0, 1.0, inf, 3.0, 3e38]),
        torch.tensor([1.0, -inf, 1.0, nan, 0.0]),
    )
    got = fma(a, b, c)
    assert torch.equal(got.isnan(), torch.tensor([False, True, True, True, False]))
    assert got[0] == inf
    assert got[4] == inf
