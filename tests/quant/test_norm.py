"""RMSNorm, plain, quantised and backward: values, layouts, aliases, messages."""

import pytest
import torch

from tk_serving.quant import norm_backward, norm_forward, norm_forward_and_per_token_cast, per_token_cast

EPS = 1e-6


def codes(data):
    return data.view(torch.uint8)


def made(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- forward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [16, 512, 528, 7168, 16384])
def test_float32_against_float64(hidden):
    x, weight = made(3, hidden, dtype=torch.float32), made(hidden, dtype=torch.float32, seed=1)
    out, rstd, stream = norm_forward(x, weight, EPS, out_scale=0.5, with_rstd=True)
    exact = 1 / (x.double().square().mean(dim=1) + EPS).sqrt()
    assert torch.allclose(rstd.double(), exact, rtol=1e-6, atol=0)
    assert torch.allclose(out.double(), x.double() * exact[:, None] * weight.double() * 0.5, rtol=1e-6, atol=1e-6)
    assert stream is x


def test_known_values():
    """Mean square 4, so rstd = 1/2; a product of exact numbers."""
    x = torch.tensor([[2.0, -2.0] * 8]).bfloat16()
    weight = torch.arange(16).bfloat16()
    out, rstd, _ = norm_forward(x, weight, 0.0, out_scale=2.0, with_rstd=True)
    assert rstd.tolist() == [0.5]
    assert out[0].tolist() == [2.0 * i * (-1) ** i for i in range(16)]
    assert norm_forward(x, None, 0.0)[0][0].tolist() == [1.0, -1.0] * 8
    assert norm_forward(torch.zeros(2, 16), None, EPS)[0].tolist() == torch.zeros(2, 16).tolist()


def test_the_sum_is_rounded_before_the_norm():
    x, residual = made(4, 64), made(4, 64, seed=1) * 100
    weight = made(64, seed=2)
    out, _, stream = norm_forward(x, weight, EPS, residual)
    assert torch.equal(stream, x + residual)
    assert torch.equal(out, norm_forward(x + residual, weight, EPS)[0])


def test_residual_out_may_be_the_residual():
    x, residual = made(4, 72)[:, :64], made(4, 72, seed=1)[:, :64]
    before = residual.clone()
    out, rstd, stream = norm_forward(x, None, EPS, residual, residual_out=residual)
    assert stream is residual
    assert rstd is None
    assert torch.equal(residual, x + before)
    assert torch.equal(out, norm_forward(x, None, EPS, before)[0])


def test_out():
    x, out = made(3, 32), torch.empty(3, 32, dtype=torch.bfloat16)
    assert norm_forward(x, None, EPS, out=out)[0] is out
    assert torch.equal(out, norm_forward(x, None, EPS)[0])


def test_batches_are_rows():
    x, weight = made(2, 3, 72)[..., :64], made(64, seed=1)
    out, rstd, _ = norm_forward(x, weight, EPS, with_rstd=True)
    rows = norm_forward(x.reshape(6, 64), weight, EPS, with_rstd=True)
    assert (out.shape, rstd.shape) == ((2, 3, 64), (2, 3))
    assert torch.equal(out.view(6, 64), rows[0])
    assert torch.equal(rstd.flatten(), rows[1])


def test_rows_do_not_depend_on_their_number():
    x, weight = made(9, 1296), made(1296, seed=1)
    assert torch.equal(norm_forward(x, weight, EPS)[0][4:5], norm_forward(x[4:5], weight, EPS)[0])


def test_nan_stays_in_its_row():
    x = made(2, 32, dtype=torch.float32)
    x[0, 3] = float("nan")
    out = norm_forward(x, None, EPS)[0]
    assert bool(out[0].isnan().all())
    assert not bool(out[1].isnan().any())


def test_no_rows():
    out, rstd, stream = norm_forward(torch.empty(0, 32), None, EPS, torch.empty(0, 32), with_rstd=True)
    assert (out.shape, rstd.shape, stream.shape) == ((0, 32), (0,), (0, 32))


# -- forward and cast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(False, False, False), (True, False, False), (True, True, True)])
@pytest.mark.parametrize("npc", [32, 128])
def test_cast_of_the_norm(npc, flags):
    x, residual, weight = made(5, 640), made(5, 640, seed=1), made(640, seed=2)
    out, rstd, stream = norm_forward(x, weight, EPS, residual, 0.7, with_rstd=True)
    expected = per_token_cast(out, "e4m3", npc, None, *flags)
    found = norm_forward_and_per_token_cast(x, weight, EPS, "e4m3", npc, residual, 0.7, *flags, True, with_rstd=True)
    assert torch.equal(codes(found[0][0]), codes(expected[0]))
    assert torch.equal(found[0][1], expected[1])
    assert found[0][1].stride() == expected[1].stride()
    assert torch.equal(found[1], out)
    assert torch.equal(found[2], rstd)
    assert torch.equal(found[3], stream)


def test_each_batch_has_its_own_padding():
    x = made(2, 5, 256)
    (data, sf), *rest = norm_forward_and_per_token_cast(
        x, None, EPS, "e4m3", 32, use_tma_aligned_col_major_sf=True, round_sf=True, use_packed_ue8m0=True
    )
    assert (data.shape, sf.shape, sf.stride()) == ((2, 5, 256), (2, 5, 2), (16, 1, 8))
    assert not bool(sf.as_strided((2, 2, 8), (16, 8, 1))[..., 5:].any())
    for b in range(2):
        single = norm_forward_and_per_token_cast(x[b], None, EPS, "e4m3", 32, None, 1.0, True, True, True)[0]
        assert torch.equal(codes(data[b]), codes(single[0]))
        assert torch.equal(sf[b], single[1])
    assert rest[:2] == [None, None]
    assert rest[2] is x


def test_rows_of_the_mega_moe_scales():
    """b = 64: tokens 0, 1, 31, 32, 33, 63, 64 are rows 0, 4, 124, 1, 5, 125, 128."""
    x = made(65, 256)
    mega = torch.full((2, 256), 7, dtype=torch.int32).t()
    (_, sf), *_ = norm_forward_and_per_token_cast(
        x, None, EPS, "e4m3", 32, None, 1.0, True, True, True, mega_moe_sf=mega, mega_moe_block_m=64
    )
    tokens = [0, 1, 31, 32, 33, 63, 64]
    assert torch.equal(mega[[0, 4, 124, 1, 5, 125, 128]], sf[tokens])
    assert int((mega != 7).any(dim=1).sum()) == 65
    mega_of_row_major = torch.full((2, 256), 7, dtype=torch.int32).t()
    norm_forward_and_per_token_cast(
        x, None, EPS, "e4m3", 32, round_sf=True, mega_moe_sf=mega_of_row_major, mega_moe_block_m=64
    )
    assert torch.equal(mega_of_row_major, mega)


def test_given_results():
    x = made(4, 256)
    data, sf = torch.empty(4, 256, dtype=torch.float8_e4m3fn), torch.empty(4, 2)
    plain = torch.empty(4, 256, dtype=torch.bfloat16)
    found = norm_forward_and_per_token_cast(x, None, EPS, "e4m3", 128, out=(data, sf), out_bf16=plain)
    assert found[0][0] is data
    assert found[1] is plain
    assert torch.equal(plain, norm_forward(x, None, EPS)[0])
    assert torch.equal(sf, per_token_cast(plain, "e4m3", 128)[1])


# -- backward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_scale", [1.0, 0.5])
@pytest.mark.parametrize("weighted", [True, False])
def test_against_autograd_in_float64(weighted, out_scale):
    x, g, more = (made(7, 80, dtype=torch.float32, seed=s) for s in range(3))
    weight = made(80, dtype=torch.float32, seed=3) if weighted else None
    xd = x.double().requires_grad_()
    wd = None if weight is None else weight.double().requires_grad_()
    y = xd / (xd.square().mean(dim=1, keepdim=True) + EPS).sqrt() * (1.0 if wd is None else wd) * out_scale
    y.backward(g.double())
    rstd = norm_forward(x, weight, EPS, with_rstd=True)[1]
    gx, gw = norm_backward(g, x, weight, rstd, None, out_scale)
    assert torch.allclose(gx.double(), xd.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(norm_backward(g, x, weight, rstd, more, out_scale)[0], gx + more)
    if weight is None:
        assert gw is None
    else:
        assert torch.allclose(gw.double(), wd.grad, rtol=1e-4, atol=1e-4)


def test_weight_gradient_is_added():
    x, g, weight = made(5, 32), made(5, 32, seed=1), made(32, seed=2)
    rstd = norm_forward(x, weight, EPS, with_rstd=True)[1]
    buffer = torch.full((32,), 3.0)
    _, fresh = norm_backward(g, x, weight, rstd)
    _, same = norm_backward(g, x, weight, rstd, weight_grad=buffer)
    assert fresh.dtype == torch.bfloat16
    assert same is buffer
    assert torch.allclose(buffer, fresh.float() + 3, atol=0.05)
    untouched = torch.full((32,), 3.0)
    none = torch.empty(0, 32, dtype=torch.bfloat16)
    assert norm_backward(none, none, weight, torch.empty(0), weight_grad=untouched)[1] is untouched
    assert untouched.unique().tolist() == [3.0]
    assert not bool(norm_backward(none, none, weight, torch.empty(0))[1].any())


# -- messages -------------------------------------------------------------------------------------------------

X = torch.ones(2, 64)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (TypeError, lambda: norm_forward(X.half(), None, EPS), "x: expected dtype bfloat16 or float32, got float16"),
        (ValueError, lambda: norm_forward(X[:, :24], None, EPS), "x: expected H that is a positive multiple of 16"),
        (ValueError, lambda: norm_forward(torch.ones(1, 16400), None, EPS), "at most 16384, got 16400"),
        (TypeError, lambda: norm_forward(X, torch.ones(64).bfloat16(), EPS), "weight: expected dtype float32"),
        (ValueError, lambda: norm_forward(X, torch.ones(1, 64), EPS), "weight: expected shape"),
        (ValueError, lambda: norm_forward(X, None, EPS, residual_out=X), "residual_out: expected None"),
        (ValueError, lambda: norm_forward(X, None, EPS, X[:1]), "residual: expected shape"),
        (ValueError, lambda: norm_forward_and_per_token_cast(X, None, EPS, "e4m3", 64), "num_per_channels: expected"),
        (ValueError, lambda: norm_forward_and_per_token_cast(X, None, EPS, "e2m1", 32), "fmt: expected 'e4m3'"),
        (ValueError, lambda: norm_forward_and_per_token_cast(X, None, EPS, "e4m3", 128), "multiple of"),
        (
            ValueError,
            lambda: norm_forward_and_per_token_cast(X, None, EPS, "e4m3", 32, mega_moe_block_m=64),
            "mega_moe_block_m: expected 0 without mega_moe_sf, got 64",
        ),
        (
            ValueError,
            lambda: norm_forward_and_per_token_cast(
                *(torch.ones(64, 128), None, EPS, "e4m3", 32), round_sf=True, mega_moe_block_m=64,
                mega_moe_sf=torch.zeros(1, 64, dtype=torch.int32).t(),
            ),
            "mega_moe_sf: expected storage of 128 elements, got 64",
        ),
        (ValueError, lambda: norm_backward(X, X, None, torch.ones(2), None, 1.0, X[0]), "weight_grad: expected None"),
    ],
)  # fmt: skip
def test_messages(error, call, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
