"""Element-wise casts: nearest, stochastic, seeds, messages."""

import pytest
import torch

from tk_serving.quant import cast, rand, unpack_from_e2m1fn_x2

NAN, INF = float("nan"), float("inf")
MANY = 20000


def bytes_of(*values):
    return cast(torch.tensor(values), torch.float8_e4m3fn).view(torch.uint8).tolist()


def test_nearest():
    assert bytes_of(1.0, 1.0625, 1.1875, -0.0, 2.0**-10, 3 * 2.0**-10) == [0x38, 0x38, 0x3A, 0x80, 0x00, 0x02]
    assert bytes_of(448.0, 1e9, -INF, NAN) == [0x7E, 0x7E, 0xFE, 0x7F]
    x = torch.randn(3, 5, 7)
    assert torch.equal(cast(x, torch.bfloat16), x.bfloat16())
    assert cast(x.bfloat16(), torch.float8_e4m3fn).shape == (3, 5, 7)


@pytest.mark.parametrize(
    ("value", "dtype", "down", "up"),
    [
        (1.0 + 2.0**-7 * 0.25, torch.bfloat16, 1.0, 1.0078125),
        (-3e-39, torch.bfloat16, -2.938736e-39, -3.030572e-39),
        (1.0 + 0.125 * 0.75, torch.float8_e4m3fn, 1.0, 1.125),
        (-(2.0**-9) * 2.1, torch.float8_e4m3fn, -(2.0**-8), -3 * 2.0**-9),
        (2.0**-9 * 0.3, torch.float8_e4m3fn, 0.0, 2.0**-9),
    ],
)
def test_stochastic_mean_is_the_value(value, dtype, down, up):
    found = cast(torch.full((MANY,), value), dtype, True, seed=3).double()
    ends = torch.tensor([down, up]).to(dtype).double()
    assert set(found.tolist()) == set(ends.tolist())
    fraction = (torch.tensor(value).double() - ends[0]) / (ends[1] - ends[0])
    share = (found == ends[1]).double().mean()
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / MANY) ** 0.5


def test_stochastic_keeps_exact_values_and_saturates():
    exact = torch.tensor([0.0, -0.0, 1.0, 1.125, -448.0, 2.0**-9, 0.3125]).repeat(500)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        found = cast(exact, dtype, True, seed=0).float()
        assert torch.equal(found.view(torch.int32), exact.view(torch.int32))
    special = torch.tensor([INF, -INF, NAN, 460.0])
    assert cast(special, torch.float8_e4m3fn, True, seed=0).view(torch.uint8).tolist() == [0x7E, 0xFE, 0x7F, 0x7E]
    assert cast(special, torch.bfloat16, True, seed=0)[:2].tolist() == [INF, -INF]
    assert cast(special, torch.bfloat16, True, seed=0)[2].isnan()


def test_neighbouring_elements_are_independent():
    up = cast(torch.full((MANY,), 1.0 + 2.0**-8), torch.bfloat16, True, seed=1).float() > 1
    both = (up[1:] & up[:-1]).double().mean()
    assert abs(both - 0.25) < 4 * (0.1875 / MANY) ** 0.5


def test_seeds():
    x = torch.full((64,), 1.0 + 2.0**-8)

    def calls(seed):
        rand.set_seed(seed)
        return [cast(x, torch.bfloat16, True).float() for _ in range(2)]

    first, again, other = calls(5), calls(5), calls(6)
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], other[0])
    rand.set_seed(0)
    with pytest.raises(TypeError, match="set_seed: seed: expected int, got float"):
        rand.set_seed(1.0)


@pytest.mark.parametrize(
    ("error", "args", "message"),
    [
        (TypeError, (torch.ones(2).half(), torch.bfloat16), "x: expected dtype float32 or bfloat16, got float16"),
        (
            TypeError,
            (torch.ones(2).bfloat16(), torch.bfloat16),
            "dtype: expected torch.float8_e4m3fn for bfloat16 values, got torch.bfloat16",
        ),
        (TypeError, (torch.ones(2), "bf16"), "dtype: expected torch.dtype, got str"),
        (ValueError, (torch.ones(2, 3).T, torch.bfloat16), "x: expected a contiguous tensor, got strides [1, 3]"),
    ],
)
def test_messages(error, args, message):
    with pytest.raises(error) as caught:
        cast(*args)
    assert str(caught.value) == f"cast: {message}"


def test_compiles_with_a_dtype_argument():
    found = torch.compile(lambda x: cast(x, torch.bfloat16), backend="aot_eager", fullgraph=True)(torch.ones(4))
    assert found.dtype == torch.bfloat16


# -- unpack_from_e2m1fn_x2 ------------------------------------------------------------------------------------


def test_unpack_example():
    packed = torch.tensor([0xA1, 0x64, 0x78, 0x80], dtype=torch.uint8)
    found = unpack_from_e2m1fn_x2(packed)
    assert found.tolist() == [0.5, -1.0, 2.0, 4.0, -0.0, 6.0, 0.0, -0.0]
    assert torch.signbit(found).tolist() == [False, True, False, False, True, False, False, True]


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 0, 4)])
def test_unpack_shapes_and_dtypes(shape):
    x = torch.randint(-128, 128, shape, dtype=torch.int8)
    found = unpack_from_e2m1fn_x2(x, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found.shape == (*shape[:-1], 2 * shape[-1])
    assert torch.equal(found.float(), unpack_from_e2m1fn_x2(x.view(torch.uint8)))


def test_unpack_messages():
    with pytest.raises(TypeError, match="unpack_from_e2m1fn_x2: x: expected dtype int8 or uint8, got float32"):
        unpack_from_e2m1fn_x2(torch.ones(2))
    with pytest.raises(ValueError, match=r"unpack_from_e2m1fn_x2: x: expected shape \[..., C\] with C at least 1"):
        unpack_from_e2m1fn_x2(torch.zeros(2, 0, dtype=torch.int8))
