"""The rules by which results are accepted must themselves reject what is wrong."""

import torch

from tk_serving.compare import BITWISE, Bitwise, Close, Diff, Steps, diff


def test_bitwise_sees_a_sign_of_zero_a_dtype_and_a_stride():
    zero = torch.tensor([0.0])
    assert BITWISE.difference(zero, zero.clone()) is None
    assert "1 of 1 elements differ" in BITWISE.difference(torch.tensor([-0.0]), zero)
    assert "instead of" in BITWISE.difference(zero.double(), zero)
    square = torch.zeros(2, 2)
    assert "strides" in BITWISE.difference(square.t(), square)


def test_bitwise_nan_payloads():
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert BITWISE.difference(quiet, other) is None
    assert Bitwise(nan_payload=True).difference(quiet, other) is not None
    assert BITWISE.difference(quiet, torch.zeros(1)) is not None


def test_steps_allows_one_code_in_a_small_share():
    codes = torch.arange(100, dtype=torch.uint8).view(torch.float8_e4m3fn)
    one = codes.view(torch.uint8).clone()
    one[3] += 1
    assert Steps().difference(one.view(torch.float8_e4m3fn), codes) is None
    two = codes.view(torch.uint8).clone()
    two[3] += 2
    assert Steps().difference(two.view(torch.float8_e4m3fn), codes) is not None
    many = codes.view(torch.uint8).clone()
    many[:40] += 1
    assert "40 of 100 codes" in Steps().difference(many.view(torch.float8_e4m3fn), codes)


def test_steps_crosses_zero():
    minus = torch.tensor([-(2.0**-9)]).to(torch.float8_e4m3fn)
    assert Steps().difference(minus, torch.zeros(1).to(torch.float8_e4m3fn)) is None


def test_close_and_diff():
    x = torch.tensor([1.0, 2.0, float("nan")])
    assert Close(1e-3, 0).difference(x * 1.0005, x) is None
    assert "first at [0]" in Close(1e-4, 0).difference(x * 1.0005, x)
    y = torch.randn(1000)
    assert Diff(1e-6).difference(y + 1e-5, y) is None
    assert "not below" in Diff(1e-6).difference(-y, y)
    assert diff(torch.zeros(2), torch.zeros(2)) == 0.0
