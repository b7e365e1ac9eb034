"""Cast and cast-back in place: the same values as the two operators, layouts, messages."""

import pytest
import torch

from tk_serving.quant import per_token_cast, per_token_cast_and_cast_back, per_token_cast_back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("fmt", "npc", "flags"),
    [
        ("e4m3", 128, {}),
        ("e4m3", 64, {"round_sf": True}),
        ("e2m1", 32, {"round_sf": True}),
        ("e2m1", 16, {"use_e4m3_sf": True}),
    ],
)
def test_equals_the_two_casts(dtype, fmt, npc, flags):
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(npc)).to(dtype)
    x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), 0.0
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    expected = per_token_cast_back(per_token_cast(x, fmt, npc, **flags), name, npc)
    assert per_token_cast_and_cast_back(x, fmt, npc, **flags) is None
    assert torch.equal(x.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_example():
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([6.0, -1.25, 2.5, 5.0, -0.2])
    per_token_cast_and_cast_back(x, "e2m1", 32)
    assert x[0, :5].tolist() == [6.0, -1.0, 2.0, 4.0, 0.0]
    assert torch.signbit(x[0, 4])


def test_strided_rows_leave_the_rest():
    whole = torch.randn(4, 96)
    before = whole.clone()
    per_token_cast_and_cast_back(whole[:, 32:64], "e4m3", 32)
    assert torch.equal(whole[:, :32], before[:, :32])
    assert torch.equal(whole[:, 64:], before[:, 64:])
    assert not torch.equal(whole[:, 32:64], before[:, 32:64])


def test_a_second_time_changes_nothing_with_rounded_scales():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    per_token_cast_and_cast_back(x, "e2m1", 32, round_sf=True)
    once = x.clone()
    per_token_cast_and_cast_back(x, "e2m1", 32, round_sf=True)
    assert torch.equal(x, once)


def test_no_rows():
    per_token_cast_and_cast_back(torch.empty(0, 64), "e4m3", 64)


@pytest.mark.parametrize(
    ("error", "args", "message"),
    [
        (TypeError, (torch.ones(2, 64).half(), "e4m3", 64), "x: expected dtype bfloat16 or float32, got float16"),
        (ValueError, (torch.ones(2, 64), "e5m6", 64), "fmt: expected 'e4m3' or 'e2m1', got 'e5m6'"),
        (ValueError, (torch.ones(2, 96), "e4m3", 96), "num_per_channels: expected 16 or 32 or 64 or 128, got 96"),
        (ValueError, (torch.ones(2, 96), "e4m3", 64), "x: expected H that is a positive multiple of 64, got 96"),
        (ValueError, (torch.ones(2, 64), "e4m3", 64, True, True), "use_e4m3_sf: expected no round_sf, got True"),
    ],
)
def test_messages(error, args, message):
    with pytest.raises(error) as caught:
        per_token_cast_and_cast_back(*args)
    assert str(caught.value) == f"per_token_cast_and_cast_back: {message}"
