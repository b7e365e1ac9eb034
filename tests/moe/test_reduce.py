"""reduce_fused, reduce_fused_add: order and rounding of the sum, scales, formats, strides, messages."""

import numpy as np
import pytest
import torch

from tk_serving.moe import reduce_fused, reduce_fused_add
from tk_serving.operator import find


def positions(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_m06_order_of_the_sum():
    x = torch.tensor([2.0**24, 1.0, -(2.0**24)])[:, None].repeat(1, 256)
    assert reduce_fused(x, torch.ones(1, 3), positions([0, 1, 2])).unique().tolist() == [0.0]
    assert reduce_fused(x, torch.ones(1, 3), positions([0, 2, 1])).unique().tolist() == [1.0]


def test_one_rounding_for_product_and_sum():
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: the last bit survives only if the product is not rounded first.
    value = 1 + 2.0**-12
    x = torch.tensor([[-1.0 - 2.0**-11] * 8, [value] * 8])
    total = reduce_fused(x, torch.tensor([[1.0, value]]), positions([0, 1]))
    assert total.unique().tolist() == [2.0**-24]


def test_against_exact_arithmetic():
    rng = np.random.default_rng(2)
    x = torch.from_numpy(rng.normal(size=(5, 8)).astype(np.float32))
    weights = torch.from_numpy(rng.random((2, 3)).astype(np.float32))
    x_sf = torch.from_numpy(rng.random(5).astype(np.float32))
    at = positions([4, -1, 2], [1, 5, 0])
    from fractions import Fraction

    expected = []
    for t in range(2):
        row = []
        for h in range(8):
            acc = Fraction(0)
            for k in range(3):
                p = int(at[t, k])
                if 0 <= p < 5:
                    scale = Fraction(float(np.float32(weights[t, k].numpy() * x_sf[p].numpy())))
                    exact = Fraction(float(x[p, h])) * scale + acc
                    # Numerator and denominator are exact; longdouble keeps enough bits for one rounding here.
                    acc = Fraction(float(np.float32(np.longdouble(exact.numerator) / np.longdouble(exact.denominator))))
            row.append(float(acc))
        expected.append(row)
    assert reduce_fused((x, x_sf), weights, at).tolist() == expected


def test_missing_positions():
    x = torch.full((2, 8), float("nan"))
    x[0] = 3.0
    total = reduce_fused(x, None, positions([-1, -1], [0, 2], [-5, 0]))
    assert total.tolist() == [[0.0] * 8, [3.0] * 8, [3.0] * 8]
    assert reduce_fused(x[:0], None, positions([0, 1])).tolist() == [[0.0] * 8]


def test_bfloat16_is_rounded_once_to_even():
    x = torch.tensor([[1.0] * 8, [2.0**-8] * 8], dtype=torch.bfloat16)
    assert reduce_fused(x, None, positions([0, 1])).unique().tolist() == [1.0]
    x[0] = 1 + 2.0**-7
    assert reduce_fused(x, None, positions([0, 1])).unique().tolist() == [1 + 2.0**-6]


def test_e4m3_result_saturates():
    x = torch.tensor([[1.0, -1, 300, -300, float("inf"), float("nan"), 0.0, 17]], dtype=torch.bfloat16)
    out = reduce_fused(x, None, positions([0]), "e4m3", torch.tensor([2.0]))
    assert out.dtype == torch.float8_e4m3fn
    assert out.view(torch.uint8).tolist() == [[0x40, 0xC0, 0x7E, 0xFE, 0x7E, 0x7F, 0x00, 0x60]]
    kernel = find("reduce_fused").call("simulator", x, None, positions([0]), "e4m3", torch.tensor([2.0]))
    assert kernel.view(torch.uint8).tolist() == out.view(torch.uint8).tolist()


def test_result_dtypes():
    codes = torch.full((1, 8), 2.0).to(torch.float8_e4m3fn)
    sf = torch.tensor([3.0])
    for data in (codes, codes.bfloat16(), codes.float()):
        out = reduce_fused((data, sf), None, positions([0]))
        assert out.dtype == data.dtype
        assert out.float().unique().tolist() == [6.0]


def test_preallocated_result():
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    assert reduce_fused(x, None, positions([0], [-1]), out=out) is out
    assert out.tolist() == [[1.0] * 8, [0.0] * 8]


def test_rows_may_be_strided():
    wide = torch.randn(3, 32)
    at = positions([0, 1], [2, -1])
    assert torch.equal(reduce_fused(wide[:, 8:24], None, at), reduce_fused(wide[:, 8:24].contiguous(), None, at))
    kernel = find("reduce_fused").call("simulator", wide[:, 7:23], None, at)
    assert torch.equal(kernel, reduce_fused(wide[:, 7:23], None, at))


def test_l04_offsets_past_32_bits():
    x = torch.empty(2**31 + 64, dtype=torch.int8).as_strided((2, 64), (2**31, 1))
    x[:] = torch.randint(0, 126, (2, 64))
    x = x.view(torch.float8_e4m3fn)
    sf = torch.ones(2)
    kernel = find("reduce_fused").call("simulator", (x, sf), None, positions([1]))
    assert torch.equal(kernel.view(torch.int8), x[1:].view(torch.int8))


def test_shared_expert_is_added_before_the_rounding():
    x = torch.tensor([[2.0**-9] * 8], dtype=torch.bfloat16)
    shared = torch.full((2, 8), 1 + 2.0**-7, dtype=torch.bfloat16)
    out = reduce_fused_add(x, shared, torch.tensor([[3.0, 1.0]] * 2), positions([0, 0], [-1, -1]))
    # 4 * 2^-9 makes half a step: a tie, to even. The products alone would vanish one by one.
    assert out[0].unique().tolist() == [1 + 2.0**-6]
    assert out[1].unique().tolist() == [1 + 2.0**-7]
    assert reduce_fused_add(x, shared, None, positions([0], [0]), shared) is shared
    assert reduce_fused_add(x[:0], shared[:1], None, positions([0])).tolist() == shared[:1].tolist()


X = torch.zeros(3, 8, dtype=torch.bfloat16)
AT = positions([0, 1], [2, -1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.half(), None, AT), TypeError, "x: expected dtype bfloat16 or float32, got float16"),
        ((X.to(torch.float8_e4m3fn), None, AT), TypeError, "x: expected dtype bfloat16 or float32, got float8_e4m3fn"),
        ((X[:, :7], None, AT), ValueError, "x: expected a row length that is a positive multiple of 8, got 7"),
        (((X, torch.ones(2)), None, AT), ValueError, r"x\[1\]: expected shape \[3\], got \[2\]"),
        ((X, torch.ones(2, 3), AT), ValueError, r"topk_weights: expected shape \[2, 2\], got \[2, 3\]"),
        ((X, torch.ones(2, 2).half(), AT), TypeError, "topk_weights: expected dtype float32, got float16"),
        ((X, None, AT.long()), TypeError, "token_topk_to_pos: expected dtype int32, got int64"),
        ((X, None, AT, "e5m2"), ValueError, "fp8_format: expected '' or 'e4m3', got 'e5m2'"),
        ((X, None, AT, "", torch.ones(1)), ValueError, "sf: expected None unless fp8_format is 'e4m3', got a tensor"),
        ((X, None, AT, "e4m3", torch.ones(2)), ValueError, r"sf: expected shape \[1\], got \[2\]"),
        ((X, None, AT, "", None, torch.zeros(2, 8)), TypeError, "out: expected dtype bfloat16, got float32"),
        ((X, None, AT, "", None, X), ValueError, r"out: expected shape \[2, 8\], got \[3, 8\]"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=f"^reduce_fused: {message}"):
        reduce_fused(*arguments)


def test_messages_with_shared():
    with pytest.raises(ValueError, match=r"^reduce_fused_add: shared: expected shape \[2, 8\], got \[3, 8\]"):
        reduce_fused_add(X, X, None, AT)
    with pytest.raises(TypeError, match=r"^reduce_fused_add: shared: expected dtype bfloat16 or float32, got float16"):
        reduce_fused_add(X, X[:2].half(), None, AT)


def test_traffic_counts_the_rows_of_the_pairs():
    x, weights, pos = torch.zeros(1000, 64, dtype=torch.bfloat16), torch.ones(2, 3), positions([0, 1, 2], [3, 4, 5])
    common = 2 * 3 * 4 + 2 * 3 * 4 + 6 * 64 * 2 + 2 * 64 * 2
    assert reduce_fused.operator.compulsory_bytes(x, weights, pos, "", None, None) == common
    assert reduce_fused.operator.compulsory_bytes((x, torch.ones(1000)), weights, pos, "", None, None) == common + 6 * 4
    assert reduce_fused_add.operator.compulsory_bytes(x, x[:2], weights, pos, None) == common + 2 * 64 * 2
