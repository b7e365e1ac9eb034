"""The pre-norm product: mhc_pre_norm_fn, its parts, their sums, and the gradients."""

import pytest
import torch
from mhc_inputs import bf16, f32, formula

from tk_serving.mhc import (
    mhc_fn_normw_merge_bwd,
    mhc_fn_normw_merge_fwd,
    mhc_pre_norm_fn,
    mhc_pre_norm_gemm,
    mhc_pre_norm_gemm_bwd,
    mhc_reduce_partials_and_rmsnorm_bwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
)
from tk_serving.mhc._math import tf32
from tk_serving.mhc._partials import num_splits
from tk_serving.operator import find


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (0x3F800000, 0x3F800000),
        (0x3F800FFF, 0x3F800000),
        (0x3F801000, 0x3F802000),  # a tie goes up in magnitude
        (0x3F803000, 0x3F804000),  # also where nearest even would go down
        (-0x7FFFF000, -0x7FFFE000),  # a negative subnormal
        (0x7F7FFFFF, 0x7F800000),  # the largest finite value becomes infinite
        (0x7F800000, 0x7F800000),
        (0x7F800001, 0x7F800001),  # NaN keeps its payload
        (0x00000FFF, 0x00000000),
    ],
)
def test_rounding_to_tf32(pattern, expected):
    x = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    assert tf32(x).view(torch.int32).item() == expected


@pytest.mark.parametrize("shape", [(5,), (2, 3), ()])
def test_values(shape):
    residual, fn, weight = bf16(*shape, 4, 64), f32(24, 256), f32(256, seed=2)
    out = mhc_pre_norm_fn(residual, fn, weight, 1e-3)
    assert out.shape == (*shape, 24)
    x = residual.double().flatten(-2)
    folded = tf32(fn * weight).double()
    expected = x @ folded.T / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_matrix_is_rounded_to_tf32():
    residual = torch.zeros(1, 4, 64).bfloat16()
    residual[0, 0, 0] = 1.0
    fn = torch.zeros(24, 256)
    fn[:, 0] = 1.0 + 2**-12
    mul, sqr = mhc_pre_norm_gemm(residual, fn)
    assert mul.sum(0).eq(1.0).all()
    fn[:, 0] = 1.0 + 2**-11
    assert mhc_pre_norm_gemm(residual, fn)[0].sum(0).eq(1.0 + 2**-10).all()
    assert sqr.sum() == 1.0


@pytest.mark.parametrize(
    ("hidden", "mixes", "n_splits", "expected"),
    [
        (4096, 24, 16, 16),
        (5120, 24, 16, 16),
        (7168, 24, 16, 16),
        (1280, 24, 16, 14),
        (4096, 24, 1, 8),  # at most 16 warps of a block, as a slice of the matrix lies in registers
        (4096, 32, 1, 11),
        (4096, 4, 4, 8),
        (64, 24, 16, 2),
        (4096, 24, 4096, 128),
    ],
)
def test_number_of_parts(hidden, mixes, n_splits, expected):
    assert num_splits(hidden, mixes, n_splits) == expected


def test_every_column_is_in_one_part():
    residual = torch.ones(1, 4, 192).bfloat16()
    fn = torch.zeros(3, 768)
    fn[0] = 1.0
    fn[1, ::192], fn[2, 191::192] = 1.0, 1.0
    mul, sqr = mhc_pre_norm_gemm(residual, fn, n_splits=4)
    assert mul[:, 0, 0].tolist() == sqr[:, 0].tolist() == [256.0, 256.0, 256.0]
    assert mul[:, 0, 1].tolist() == [4.0, 0.0, 0.0]
    assert mul[:, 0, 2].tolist() == [0.0, 0.0, 4.0]


def test_h02_a_row_does_not_depend_on_its_batch():
    residual, fn = formula(257, 4 * 1280).view(257, 4, 1280), f32(24, 5120) / 72
    op = find("mhc_pre_norm_fn")
    first = [op.call("simulator", residual[:rows], fn, None, 1e-6)[0] for rows in (1, 2, 33, 257)]
    assert all(torch.equal(first[0], other) for other in first[1:])


def test_h04_square_sum(implementation):
    residual = formula(16, 4 * 7168).view(16, 4, 7168)
    _, sqr = find("mhc_pre_norm_gemm").call(implementation, residual, torch.zeros(1, 4 * 7168))
    total = sqr.double().sum(0)[0].item()
    assert total == pytest.approx(145864.96228027, rel=1e-5)


def test_h07_any_token_count():
    residual, fn = bf16(128, 4, 64), f32(24, 256)
    op = find("mhc_pre_norm_fn")
    whole = op.call("simulator", residual, fn, None, 1e-6)
    for tokens in (1, 3, 5, 7, 9, 127):
        assert torch.equal(op.call("simulator", residual[:tokens], fn, None, 1e-6), whole[:tokens])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_bad_value_stays_in_its_row(value, implementation):
    residual, fn = bf16(18, 4, 64), f32(24, 256)
    clean = find("mhc_pre_norm_fn").call(implementation, residual, fn, None, 1e-6)
    residual[3, 1, 7] = value
    out = find("mhc_pre_norm_fn").call(implementation, residual, fn, None, 1e-6)
    keep = torch.arange(18) != 3
    assert out[3].isnan().all()
    assert torch.equal(out[keep], clean[keep])


def test_n_splits_and_fuse_grad_acc_are_accepted():
    residual, fn = bf16(3, 4, 128), f32(24, 512)
    one = mhc_pre_norm_fn(residual, fn, None, 1e-6, fuse_grad_acc=False, n_splits=1)
    torch.testing.assert_close(one, mhc_pre_norm_fn(residual, fn, None, 1e-6), rtol=1e-5, atol=1e-5)


def test_sum_of_parts_and_scaling():
    mul, sqr = f32(3, 5, 2, 24), f32(3, 5, 2, seed=2).square()
    out_mul, sqrsum, out = torch.empty(5, 2, 24), torch.empty(5, 2), torch.empty(5, 24)
    mhc_reduce_partials_and_rmsnorm_fwd(mul, sqr, out_mul, sqrsum, out, 100, 1e-3, 3)
    assert torch.equal(out_mul, mul[0] + mul[1] + mul[2])
    assert torch.equal(sqrsum, sqr[0] + sqr[1] + sqr[2])
    expected = (out_mul.double() / (sqrsum.double() / 100 + 1e-3).sqrt()[..., None]).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_parts_are_added_in_ascending_order(implementation):
    mul = torch.zeros(3, 1, 1, 24)
    mul[:, 0, 0, 0] = torch.tensor([2.0**24, 1.0, -(2.0**24)])
    out_mul, sqrsum, out = torch.empty(1, 1, 24), torch.empty(1, 1), torch.empty(1, 24)
    op = find("mhc_reduce_partials_and_rmsnorm_fwd")
    op.call(implementation, mul, torch.ones(3, 1, 1), out_mul, sqrsum, out, 3, 0.0, 3)
    assert out_mul[0, 0, 0] == 0.0
    assert sqrsum.item() == 3.0


def test_gradient_of_the_scaling():
    mul, sqr, grad = f32(5, 1, 24), f32(5, 1, seed=2).square() + 1, f32(5, 24, seed=3)
    leaves = [t.double().requires_grad_() for t in (mul, sqr)]
    expected = torch.autograd.grad(
        (leaves[0] / (leaves[1] / 64 + 1e-3).sqrt()[..., None]).sum(1), leaves, grad.double()
    )
    mul_grad, sqr_grad = torch.empty_like(mul), torch.empty_like(sqr)
    mhc_reduce_partials_and_rmsnorm_bwd(grad, mul, sqr, mul_grad, sqr_grad, 64, 1e-3)
    torch.testing.assert_close(mul_grad.double(), expected[0], rtol=2**-11, atol=0)
    assert torch.equal(mul_grad, tf32(mul_grad))
    torch.testing.assert_close(sqr_grad.double(), expected[1], rtol=1e-5, atol=1e-6)


def test_gradient_of_the_product():
    residual, fn, weight = bf16(5, 4, 64), f32(24, 256), f32(256, seed=2)
    mul_grad, sqr_grad = tf32(f32(5, 24, seed=3)), f32(5, seed=4)
    residual_grad, fn_grad = mhc_pre_norm_gemm_bwd(residual, fn, weight, mul_grad, sqr_grad)
    x, folded = residual.double().flatten(1), tf32(fn * weight).double()
    expected = mul_grad.double() @ folded + 2 * x * sqr_grad.double()[:, None]
    torch.testing.assert_close(residual_grad.double().flatten(1), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(fn_grad.double(), mul_grad.double().T @ x, rtol=1e-5, atol=1e-4)


def test_folded_norm_weight():
    fn, weight, grad = f32(24, 256), f32(256, seed=2), f32(24, 256, seed=3)
    assert torch.equal(mhc_fn_normw_merge_fwd(fn, weight), fn * weight)
    fn_grad, weight_grad = mhc_fn_normw_merge_bwd(grad, fn, weight)
    assert torch.equal(fn_grad, grad * weight)
    torch.testing.assert_close(weight_grad, (grad * fn).sum(0))


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_gradients_of_the_fold_are_added_to_what_is_given(given, implementation):
    fn, weight, grad = f32(24, 256), f32(256, seed=2), f32(24, 256, seed=3)
    fn_grad = torch.ones(24, 256) if given[0] else None
    weight_grad = torch.ones(256) if given[1] else None
    results = find("mhc_fn_normw_merge_bwd").call(implementation, grad, fn, weight, fn_grad, weight_grad)
    assert [a is b for a, b in zip(results, (fn_grad, weight_grad), strict=True)] == list(given)
    torch.testing.assert_close(results[0], given[0] * 1.0 + grad * weight)
    torch.testing.assert_close(results[1], given[1] * 1.0 + (grad * fn).sum(0), rtol=1e-5, atol=1e-5)


def test_no_tokens():
    fn = f32(24, 256)
    assert mhc_pre_norm_fn(bf16(0, 4, 64), fn, None, 1e-6).shape == (0, 24)
    mul, sqr = mhc_pre_norm_gemm(bf16(0, 4, 64), fn)
    assert (mul.shape, sqr.shape) == ((2, 0, 24), (2, 0))
    residual_grad, fn_grad = mhc_pre_norm_gemm_bwd(bf16(0, 4, 64), fn, None, torch.empty(0, 24), torch.empty(0))
    assert residual_grad.shape == (0, 4, 64)
    assert fn_grad.eq(0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"residual": torch.zeros(2, 4, 64)}, TypeError, "residual: expected dtype bfloat16, got float32"),
        ({"residual": bf16(2, 2, 64)}, ValueError, r"residual: expected shape \[..., 4, H\], got \[2, 2, 64\]"),
        (
            {"residual": bf16(2, 4, 72)},
            ValueError,
            "residual: expected a hidden size that is a positive multiple of 64",
        ),
        ({"residual": bf16(4, 2, 64).transpose(0, 1)}, ValueError, "residual: expected a contiguous tensor"),
        ({"mhc_fn": f32(24, 128)}, ValueError, r"mhc_fn: expected shape \[m, 256\], got \[24, 128\]"),
        ({"mhc_fn": f32(33, 256)}, ValueError, "mhc_fn: expected 1 to 32 rows, got 33"),
        ({"mhc_norm_weight": f32(64)}, ValueError, r"mhc_norm_weight: expected shape \[256\], got \[64\]"),
        ({"n_splits": 0}, ValueError, "n_splits: expected at least 1, got 0"),
    ],
)
def test_refused(change, error, message):
    arguments = {"residual": bf16(2, 4, 64), "mhc_fn": f32(24, 256), "mhc_norm_weight": None, "mhc_norm_eps": 1e-6}
    with pytest.raises(error, match=f"mhc_pre_norm_fn: {message}"):
        mhc_pre_norm_fn(**arguments | change)


def test_number_of_parts_must_agree():
    empty = torch.empty(2, 1, 24), torch.empty(2, 1), torch.empty(2, 24)
    with pytest.raises(ValueError, match="n_splits: expected 3, the parts of out_mul_splitted, got 16"):
        mhc_reduce_partials_and_rmsnorm_fwd(f32(3, 2, 1, 24), f32(3, 2, 1), *empty, 256, 1e-6, 16)
