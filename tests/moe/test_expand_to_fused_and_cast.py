"""expand_to_fused_and_cast: the bytes of cast and expand one after the other, against numbers and both operators."""

import pytest
import torch

from tk_serving.config import settings
from tk_serving.moe import expand_to_fused_and_cast, expand_to_fused_with_sf
from tk_serving.operator import find
from tk_serving.quant import per_token_cast

POSITIONS = torch.tensor([[0, 4], [5, -1]], dtype=torch.int32)
OWNERS = torch.tensor([0, -1, -1, -1, 1, 1], dtype=torch.int32)


def example():
    x = torch.zeros(2, 144, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([3.0, 1.0, -0.5])
    x[0, 128] = 448.0
    return x


def test_exact_scales():
    data, sf = expand_to_fused_and_cast(example(), "e4m3", 128, POSITIONS, OWNERS, True)
    assert (data.dtype, data.shape, sf.shape, sf.stride()) == (torch.float8_e4m3fn, (6, 144), (6, 2), (1, 8))
    of_3, of_floor = (torch.tensor(v) / torch.tensor(448.0) for v in (3.0, 1e-4))
    assert sf[[0, 4]].tolist() == [[of_3.item(), 1.0]] * 2
    assert sf[5].tolist() == [of_floor.item()] * 2
    assert sf[1:4].tolist() == [[0.0, 0.0]] * 3
    assert data[0, :3].float().tolist() == data[4, :3].float().tolist() == [448.0, 144.0, -72.0]
    assert data[0, 128].item() == 448.0
    assert data[1:4].view(torch.uint8).unique().tolist() == [0]


def test_packed_scales():
    data, sf = expand_to_fused_and_cast(example(), "e4m3", 128, POSITIONS, OWNERS, True, True, True)
    assert (sf.dtype, sf.shape, sf.stride()) == (torch.int32, (6, 1), (1, 8))
    # 3 / 448 rounds up to 2^-7, 448 / 448 is 2^0, the floor gives 2^-22; bytes of further groups are 0.
    assert sf.flatten().tolist() == [120 | 127 << 8, 0, 0, 0, 120 | 127 << 8, 105 | 105 << 8]
    assert data[4, :3].float().tolist() == [384.0, 128.0, -64.0]


@pytest.mark.parametrize(
    "flags", [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("npc", [32, 128])
def test_equals_cast_then_expand(fmt, npc, flags):
    x = torch.randn(2, 224).bfloat16()
    both = expand_to_fused_with_sf(per_token_cast(x, fmt, npc, None, *flags), npc, POSITIONS, OWNERS, flags[0])
    fused = expand_to_fused_and_cast(x, fmt, npc, POSITIONS, OWNERS, *flags)
    for a, b in zip(fused, both, strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert torch.equal(a.view(torch.uint8) if a.itemsize == 1 else a, b.view(torch.uint8) if b.itemsize == 1 else b)


def test_result_that_is_not_aligned(monkeypatch):
    monkeypatch.setattr(settings, "cpu", "simulator")
    x = torch.randn(2, 144).bfloat16()
    expected = expand_to_fused_and_cast(x, "e4m3", 128, POSITIONS, OWNERS)
    data = torch.empty(6 * 144 + 1, dtype=torch.float8_e4m3fn)[1:].view(6, 144)
    find("expand_to_fused_and_cast").into((data, None), x, "e4m3", 128, POSITIONS, OWNERS)
    assert torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))


def test_no_tokens():
    data, sf = expand_to_fused_and_cast(example()[:0], "e2m1", 32, POSITIONS[:0], OWNERS, True)
    assert (data.shape, data.dtype, sf.shape) == ((6, 72), torch.int8, (6, 5))
    assert data.unique().tolist() == [0]
    assert sf.unique().tolist() == [0.0]


X = torch.zeros(2, 144)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.half(), "e4m3", 128), TypeError, "x: expected dtype bfloat16 or float32, got float16"),
        ((X[:, :100], "e4m3", 128), ValueError, "x: expected H that is a positive multiple of 16, got 100"),
        ((X, "e5m6", 128), ValueError, "fmt: expected 'e4m3' or 'e2m1', got 'e5m6'"),
        ((X, "e4m3", 64), ValueError, "num_per_channels: expected 32 or 128, got 64"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=f"^expand_to_fused_and_cast: {message}"):
        expand_to_fused_and_cast(*arguments, POSITIONS, OWNERS)


def test_messages_of_the_layout():
    with pytest.raises(ValueError, match=r"^expand_to_fused_and_cast: use_packed_ue8m0: expected round_sf as well"):
        expand_to_fused_and_cast(X, "e4m3", 128, POSITIONS, OWNERS, True, False, True)
