"""The scale rule, its table in the specification, and the layouts of scales."""

import pytest
import torch

from tk_serving.expect import Expect
from tk_serving.quant import scales
from tk_serving.quant.formats import FORMATS

TABLE = [  # amax, format, sf, rounded sf, its exponent byte
    (448.0, "e4m3", 1.0, 1.0, 127),
    (449.0, "e4m3", 1.0022322, 2.0, 128),
    (896.0, "e4m3", 2.0, 2.0, 128),
    (3.5, "e4m3", 0.0078125, 2.0**-7, 120),
    (1.0, "e4m3", 0.0022321430, 2.0**-8, 119),
    (0.0, "e4m3", 2.2321429e-07, 2.0**-22, 105),
    (7.0, "e2m1", 1.1666666, 2.0, 128),
    (0.0, "e2m1", 2.0**-126, 2.0**-126, 1),
    (65025.0, "e5m6", 1.0000154, 2.0, 128),
    (0.0, "e5m6", 1.5378937e-09, 2.0**-29, 98),
]


def f32(value):
    return torch.tensor([[value]], dtype=torch.float32)


@pytest.mark.parametrize(("amax", "fmt", "sf", "rounded", "byte"), TABLE)
def test_table(amax, fmt, sf, rounded, byte):
    found, inverse = scales.rule(f32(amax), FORMATS[fmt], False)
    assert torch.equal(found, f32(sf))
    floor = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126, "e5m6": 1e-4}[fmt]
    assert torch.equal(inverse, f32(FORMATS[fmt].maximum) / f32(max(amax, floor)))
    found, inverse = scales.rule(f32(amax), FORMATS[fmt], True)
    assert found.item() == rounded
    assert inverse.item() == 1 / rounded
    assert found.view(torch.int32).item() >> 23 == byte


def test_e4m3_scale():
    sf, inverse = scales.rule(f32(1.0), FORMATS["e2m1"], False, e4m3_sf=True)
    assert sf.dtype == torch.float8_e4m3fn
    assert sf.float().item() == 0.171875
    assert sf.view(torch.uint8).item() == 0x23
    assert torch.equal(inverse, f32(1.0) / f32(0.171875))
    assert round(inverse.item(), 6) == 5.818182


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_e4m3_scale_floor_is_the_smallest_e4m3(fmt):
    sf, _ = scales.rule(f32(0.0), FORMATS[fmt], False, e4m3_sf=True)
    assert sf.float().item() == 2.0**-9


def test_multiplier_is_a_second_division():
    """MAX / amax differs from 1 / sf in the last bit for many amax."""
    amax = torch.linspace(1, 2, 4096)[None]
    sf, inverse = scales.rule(amax, FORMATS["e4m3"], False)
    assert torch.equal(sf.double(), (amax.double() / 448).float().double())
    assert torch.equal(inverse, (448 / amax.double()).float())
    assert (inverse != torch.ones_like(sf) / sf).float().mean() > 0.2


@pytest.mark.parametrize("maximum", [448.0, 6.0, 65024.0])
def test_rounding_covers_the_quotient(maximum):
    """The smallest power of two that is not below f32(amax / MAX)."""
    fmt = next(f for f in FORMATS.values() if f.maximum == maximum)
    amax = torch.linspace(0.5, 4, 10007)[None] * maximum
    sf, _ = scales.rule(amax, fmt, True)
    quotient = amax / torch.full_like(amax, maximum)
    assert bool((sf >= quotient).all())
    assert bool((sf / 2 < quotient).all())


def test_sf_floor_argument():
    sf, _ = scales.rule(f32(0.0), FORMATS["e4m3"], False, floor=1e-10)
    assert torch.equal(sf, f32(1e-10) / f32(448.0))


def test_amax_ignores_nan_and_caps_infinity():
    size = torch.tensor([[1.0, float("nan"), 2.0, float("inf"), float("nan"), float("nan")]])
    amax = scales.block_amax(size, 1, 2)
    assert amax.tolist() == [[1.0, float("inf"), 0.0]]
    sf, inverse = scales.rule(amax, FORMATS["e4m3"], False)
    assert torch.equal(sf[:, 1:2], f32(3.4028235e38) / f32(448.0))
    assert torch.equal(inverse[:, 1:2], f32(448.0) / f32(3.4028235e38))


def test_amax_of_cut_blocks():
    size = torch.arange(15.0).view(3, 5)
    assert scales.block_amax(size, 2, 2).tolist() == [[6.0, 8.0, 9.0], [11.0, 13.0, 14.0]]


# -- layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "shape", "strides", "storage"),
    [
        (scales.ROW, (5, 4), None, None),
        (scales.COLUMN, (5, 4), (1, 8), 32),
        (scales.PACKED, (5, 1), (1, 8), 8),
        (scales.E4M3, (5, 4), None, None),
        (scales.E4M3_COLUMN, (5, 4), (1, 16), 64),
    ],
)
def test_allocations_of_five_rows_of_four_blocks(layout, shape, strides, storage):
    out = scales.sf_out(layout, 5, 4)
    assert (out.shape, out.strides, out.storage) == (shape, strides, storage)


@pytest.mark.parametrize("layout", [scales.COLUMN, scales.PACKED, scales.E4M3_COLUMN])
def test_no_rows(layout):
    empty = scales.lay_out(torch.empty(0, 4), layout)
    assert empty.shape[0] == 0
    assert empty.stride(0) == 1


def test_packed_word():
    sf = torch.exp2(torch.tensor([[0.0, 1.0, -22.0]]))
    packed = scales.lay_out(sf, scales.PACKED)
    assert packed.tolist() == [[0x0069807F]]
    assert torch.equal(scales.read(packed, 3), sf)


@pytest.mark.parametrize("layout", [scales.ROW, scales.COLUMN, scales.E4M3, scales.E4M3_COLUMN, scales.PACKED])
@pytest.mark.parametrize("rows", [1, 4, 5, 17])
def test_written_scales_are_read_again(layout, rows):
    sf = torch.exp2(torch.arange(rows * 5).remainder(13).float() - 6).view(rows, 5)
    stored = scales.lay_out(sf, layout)
    assert torch.equal(scales.read(stored, 5), sf)


@pytest.mark.parametrize("layout", [scales.COLUMN, scales.PACKED, scales.E4M3_COLUMN])
def test_padding_rows_are_zero(layout):
    stored = scales.lay_out(torch.ones(5, 6), layout)
    out = scales.sf_out(layout, 5, 6)
    whole = stored.as_strided((stored.shape[1], out.strides[1]), (out.strides[1], 1))
    assert bool((whole[:, 5:].contiguous().view(torch.uint8) == 0).all())


def test_ends_of_the_exponent_range():
    """Byte 0 is 2^-127, a subnormal; byte 255 is NaN."""
    packed = torch.tensor([[0x0000FF00 | 127 << 16]], dtype=torch.int32)
    decoded = scales.read(packed, 3)[0]
    assert decoded[0].item() == 2.0**-127
    assert decoded[1].isnan()
    assert decoded[2].item() == 1.0


def test_strided_scales_are_read_by_their_strides():
    packed = torch.arange(24, dtype=torch.int32).view(4, 6)[:, ::3]
    assert torch.equal(scales.read(packed, 8), scales.read(packed.contiguous(), 8))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((False, True, True, False), "use_packed_ue8m0: expected use_tma_aligned_col_major_sf as well, got False"),
        ((True, False, True, False), "use_packed_ue8m0: expected round_sf as well, got False"),
        ((True, True, True, True), "use_e4m3_sf: expected no use_packed_ue8m0, got True"),
        ((False, True, False, True), "use_e4m3_sf: expected no round_sf, got True"),
    ],
)
def test_flags_that_exclude_each_other(flags, message):
    with pytest.raises(ValueError, match=f"^op: {message}$"):
        scales.layout_of(Expect("op"), *flags)
