"""Codes of the formats: the numeric examples of the specification, ties, edges."""

import pytest
import torch

from tk_serving.quant.formats import decode, encode

NAN, INF = float("nan"), float("inf")


def codes(values, fmt):
    return encode(torch.tensor([values]), fmt)


def e5m6_codes(values):
    """12-bit codes of eight values."""
    words = codes(values, "e5m6").view(torch.int32)[0].tolist()
    w0, w1, w2 = (w & 0xFFFFFFFF for w in words)
    long = (w0 << 64) | (w1 << 32) | w2
    return [(long >> (84 - 12 * i)) & 0xFFF for i in range(8)]


def test_e4m3_nan_infinity_and_saturation():
    found = codes([NAN, -NAN, INF, -INF, 448.0, 464.0, 1e30, -0.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9], "e4m3")
    assert found.view(torch.uint8).tolist() == [[0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0x80, 0x01, 0x00, 0x02]]


def test_e2m1_example():
    found = codes([0.5, -1.25, 2.5, 5.0, -0.0, 6.0, 0.25, -0.2], "e2m1")
    assert found.dtype == torch.int8
    assert found.view(torch.uint8).tolist() == [[0xA1, 0x64, 0x78, 0x80]]


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.0000005, 7), (100.0, 7), (INF, 7)],
)
def test_e2m1_midpoints_go_to_even_codes(value, code):
    assert codes([value, -value], "e2m1").view(torch.uint8).item() == code | (code | 8) << 4


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_e2m1_neighbours_of_midpoints(tie):
    down, up = (
        torch.nextafter(torch.tensor(tie), torch.tensor(0.0)),
        torch.nextafter(torch.tensor(tie), torch.tensor(9.0)),
    )
    packed = codes([float(down), float(up)], "e2m1").view(torch.uint8).item()
    assert (packed >> 4) == (packed & 15) + 1


def test_e2m1_nan_is_plus_six():
    assert codes([NAN, -NAN], "e2m1").view(torch.uint8).item() == 0x77


def test_e2m1_values():
    data = torch.arange(16, dtype=torch.uint8)[:, None].view(torch.int8)
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    decoded = decode(data, "e2m1")[:, 0]
    assert decoded.tolist() == half + [-v for v in half]
    assert torch.signbit(decoded[8])


def test_e5m6_test_vector():
    values = [1.0, -2.0, 3.0, 4.0, 5.03125, 6.0, 0.1, 65024.0]
    assert e5m6_codes(values) == [0x3C0, 0xC00, 0x420, 0x440, 0x450, 0x460, 0x2E6, 0x7BF]
    data = codes(values, "e5m6")
    assert data.dtype == torch.uint8
    assert data[0].tolist() == list(bytes.fromhex("42000c3c04454004bf672e60"))
    assert decode(data, "e5m6")[0].tolist() == [1.0, -2.0, 3.0, 4.0, 5.0, 6.0, 0.099609375, 65024.0]


def test_e5m6_edges():
    """NaN and infinities are the largest code, -0 keeps its sign, 65024 is never exceeded."""
    values = [NAN, INF, -INF, 65535.0, -0.0, 0.0, 64768.0, 64767.0]
    assert e5m6_codes(values) == [0x7BF, 0x7BF, 0xFBF, 0x7BF, 0x800, 0x000, 0x7BE, 0x7BE]


def test_e5m6_subnormals_truncate_and_round_by_the_float32_bits():
    """Below 2^-14 the 17 lowest bits of the float32 pattern decide, whatever the exponent: kept for the bytes."""
    unit = 2.0**-20
    low = 1 + 0x1FFFF * 2.0**-23
    values = [unit, 1.5 * unit, 1.96875 * unit, unit / 2, low * unit, 63.0 * unit, 2.0**-14, low * 2.0**-13]
    assert e5m6_codes(values) == [1, 1, 1, 0, 2, 63, 0x040, 0x081]


def test_e5m6_decodes_every_code_as_a_float16():
    every = torch.arange(4096)
    group = every.view(-1, 8)
    c = group.unbind(1)
    words = [c[0] << 20 | c[1] << 8 | c[2] >> 4, (c[2] & 15) << 28 | c[3] << 16 | c[4] << 4 | c[5] >> 8]
    words.append((c[5] & 255) << 24 | c[6] << 12 | c[7])
    data = torch.stack(words, 1).to(torch.int32).view(torch.uint8)
    halves = (every << 4).to(torch.int16).view(torch.float16).float()
    decoded = decode(data, "e5m6").flatten()
    assert torch.equal(decoded[~halves.isnan()], halves[~halves.isnan()])
    assert decoded[halves.isnan()].isnan().all()


def test_e5m6_data_may_start_anywhere():
    data = codes([1.0, -2.0, 3.0, 4.0, 5.0, 6.0, 0.1, 65024.0], "e5m6")
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), data[0]))[1:][None]
    assert torch.equal(decode(shifted, "e5m6"), decode(data, "e5m6"))
