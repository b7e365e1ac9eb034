"""per_token_cast and its scales-only form: examples of the specification, public faults, layouts, messages."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tk_serving.compare import diff
from tk_serving.quant import (
    per_token_cast,
    per_token_cast_back,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
    rand,
)

NAN, INF = float("nan"), float("inf")


def row(*values, width=128, dtype=torch.float32):
    x = torch.zeros(1, width, dtype=dtype)
    x[0, : len(values)] = torch.tensor(values, dtype=dtype)
    return x


def codes(data):
    return data.view(torch.uint8)


def bits(sf):
    return sf.contiguous().view(torch.int32)


# -- numeric examples -----------------------------------------------------------------------------------------


def test_block_example():
    data, sf = per_token_cast(row(3.0, 1.0, -0.1, 0.0), "e4m3", 128)
    assert torch.equal(sf, torch.tensor([[0.0066964286]]))
    assert codes(data)[0, :4].tolist() == [0x7E, 0x71, 0xD7, 0x00]
    data, sf = per_token_cast(row(3.0, 1.0, -0.1, 0.0), "e4m3", 128, round_sf=True)
    assert sf.item() == 2.0**-7
    assert codes(data)[0, :4].tolist() == [0x7C, 0x70, 0xD5, 0x00]


def test_e2m1_with_e4m3_scales():
    data, sf = per_token_cast(row(1.0, width=16), "e2m1", 16, use_e4m3_sf=True)
    assert codes(sf).item() == 0x23
    assert codes(data)[0, 0].item() == 0x07  # 5.818 is nearer to 6


def test_e5m6_vector_at_scale_one():
    data, sf = per_token_cast(row(1, -2, 3, 4, 5.03125, 6, 0.1, 65024, width=8), "e5m6", 8)
    assert sf.item() == 1.0
    assert data[0].tolist() == list(bytes.fromhex("42000c3c04454004bf672e60"))


def test_e5m6_of_bf16_works_in_float32():
    x = row(65280.0, 3.0, width=24, dtype=torch.bfloat16)
    data, sf = per_token_cast(x, "e5m6", 24)
    assert torch.equal(sf, torch.tensor([[65280.0]]) / torch.tensor([[65024.0]]))
    back = per_token_cast_back((data, sf), "fp32", 24, "e5m6")
    assert diff(back, x) < 1e-4


def test_q10_infinities_in_e5m6_become_the_largest_code():
    data, sf = per_token_cast(row(INF, -INF, 1.0, width=8), "e5m6", 8)
    assert torch.equal(sf, torch.tensor([[3.4028234663852886e38]]) / torch.tensor([[65024.0]]))
    back = per_token_cast_back((data, torch.ones(1, 1)), "fp32", 8, "e5m6")
    assert back[0, :3].tolist() == [65024.0, -65024.0, 0.0]


@pytest.mark.parametrize(("fmt", "limit"), [("e4m3", 1e-3), ("e2m1", 2e-2), ("e5m6", 1e-4)])
def test_round_trip(fmt, limit):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    npc = 512 if fmt == "e5m6" else 32
    special = "e5m6" if fmt == "e5m6" else None
    assert diff(per_token_cast_back(per_token_cast(x, fmt, npc), "fp32", npc, special), x) < limit


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_rounding_is_unbiased(fmt):
    x = torch.rand(64, 512, generator=torch.Generator().manual_seed(1)) + 0.5
    back = per_token_cast_back(per_token_cast(x, fmt, 128), "fp32", 128)
    inexact = back != x
    down = ((back < x) & inexact).sum() / inexact.sum()
    assert abs(float(down) - 0.5) < 10 / float(inexact.sum()) ** 0.5


def test_requantisation_takes_the_maximum_in_float32():
    """Q15: codes of 448, -448 and 2^-9 with scale 2 keep their codes under a rounded scale."""
    data = torch.zeros(1, 128, dtype=torch.uint8)
    data[0, :3] = torch.tensor([0x7E, 0xFE, 0x01], dtype=torch.uint8)
    found, sf = per_token_cast(
        (data.view(torch.float8_e4m3fn), torch.full((1, 1), 2.0)), "e4m3", 128, x_block_size=(1, 128), round_sf=True
    )
    assert sf.item() == 2.0
    assert torch.equal(codes(found), data)


def test_requantisation_multiplies_the_scales_first():
    data, _ = per_token_cast(row(448.0, 3.0, 5.0), "e4m3", 128)
    x_sf = torch.tensor([[0.3]])
    found, out_sf = per_token_cast((data, x_sf), "e4m3", 64, x_block_size=(1, 128))
    amax = torch.tensor([[448.0]]) * x_sf
    assert torch.equal(out_sf[:, :1], amax / torch.tensor([[448.0]]))
    multiplier = x_sf * (torch.tensor([[448.0]]) / amax)
    expected = (data.float()[:, :64] * multiplier).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes(found)[:, :64], codes(expected))


@pytest.mark.parametrize("npc", [16, 32, 64, 128, 512])
def test_requantisation_of_fp4_in_blocks(npc):
    """Every scale is a power of two, so requantised values are those of the dequantised tensor."""
    generator = torch.Generator().manual_seed(npc)
    data = torch.randint(-128, 128, (6, 256), generator=generator, dtype=torch.int8)
    x_sf = torch.exp2(torch.randint(-3, 4, (2, 16), generator=generator).float())
    plain = per_token_cast_back_blocks(data, x_sf)
    found = per_token_cast((data, x_sf), "e4m3", npc, x_block_size=(4, 32), round_sf=True)
    expected = per_token_cast(plain, "e4m3", npc, round_sf=True)
    assert torch.equal(codes(found[0]), codes(expected[0]))
    assert torch.equal(found[1], expected[1])


def per_token_cast_back_blocks(data, sf):
    from tk_serving.quant import cast_back

    return cast_back((data, sf), "fp32", (4, 32))


# -- public faults --------------------------------------------------------------------------------------------


def test_q01_zero_group_has_the_floor_scale():
    zeros = torch.zeros(1, 256, dtype=torch.bfloat16)
    for x in (zeros[:, :128].contiguous(), zeros[:, :128]):
        data, sf = per_token_cast(x, "e4m3", 128, round_sf=True)
        assert codes(data).unique().tolist() == [0]
        assert sf.item() == 2.0**-22


def test_q02_floor_comes_before_rounding():
    data, sf = per_token_cast(row(1e-5), "e4m3", 128, round_sf=True)
    assert sf.item() == 2.0**-22
    assert bits(sf).item() & 0x807FFFFF == 0
    assert data.float()[0, 0].item() == 40.0


def test_q03_data_use_the_rounded_scale():
    data, sf = per_token_cast(row(1.0), "e4m3", 128, round_sf=True)
    assert (sf.item(), codes(data)[0, 0].item()) == (2.0**-8, 0x78)
    assert data.float()[0, 0].item() * sf.item() == 1.0


def test_q05_packing_needs_rounded_scales():
    with pytest.raises(ValueError, match=r"use_packed_ue8m0: expected round_sf as well, got False"):
        per_token_cast(row(672.0), "e4m3", 128, use_tma_aligned_col_major_sf=True, use_packed_ue8m0=True)
    data, sf = per_token_cast(row(672.0), "e4m3", 128, None, True, True, True)
    assert sf.item() == 128
    assert data.float()[0, 0].item() == 336.0 - 16.0  # 336 lies between 320 and 352


@pytest.mark.parametrize("tokens", [1, 333])
def test_q06_one_group_per_row(tokens):
    x = torch.zeros(tokens, 128)
    x[:, 0] = torch.arange(1, tokens + 1)
    data, sf = per_token_cast(x, "e4m3", 128)
    assert torch.equal(sf, x[:, :1] / torch.full((tokens, 1), 448.0))
    assert bool((codes(data)[:, 0] == 0x7E).all())
    assert not bool(codes(data)[:, 1:].any())


@pytest.mark.parametrize(("amax", "value", "code"), [(8, 3, 0x72), (8, 6, 0x7A), (4, 3, 0x7A), (12, 9, 0x7A)])
def test_q07_exact_ties(amax, value, code):
    data, _ = per_token_cast(row(float(amax), float(value)), "e4m3", 128)
    assert codes(data)[0, :2].tolist() == [0x7E, code]


def test_q08_tiny_values():
    data, sf = per_token_cast(row(2.0**-24), "e4m3", 128, round_sf=True)
    assert (sf.item(), data.float()[0, 0].item()) == (2.0**-22, 0.25)


@pytest.mark.parametrize(("width", "place"), [(128, 5), (256, 3), (256, 200)])
def test_q11_q12_nan_is_ignored_by_the_maximum(width, place):
    x = torch.ones(1, width)
    x[0, place] = NAN
    data, sf = per_token_cast(x, "e4m3", width)
    assert torch.equal(sf, torch.tensor([[1.0]]) / torch.tensor([[448.0]]))
    expected = torch.full((1, width), 0x7E, dtype=torch.uint8)
    expected[0, place] = 0x7F
    assert torch.equal(codes(data), expected)


def test_q16_padding_scales_are_zero_or_powers_of_two():
    sf = torch.full((6 * 8,), NAN).as_strided((5, 6), (1, 8))
    per_token_cast_with_sf_only(torch.randn(5, 768), "e4m3", 128, None, True, True, out_sf=sf)
    assert bool((bits(sf) & 0x807FFFFF == 0).all())


def test_q18_short_last_group():
    x = torch.ones(3, 576)
    x[:, 575] = 3
    data, sf = per_token_cast(x, "e4m3", 128)
    assert sf.shape == (3, 5)
    assert torch.equal(sf[:, :4], torch.full((3, 4), 1.0) / torch.full((3, 4), 448.0))
    assert torch.equal(sf[:, 4:], torch.full((3, 1), 0.0066964286))
    assert data.shape == (3, 576)


def test_q20_no_rows():
    data, sf = per_token_cast(torch.empty(0, 512, dtype=torch.bfloat16), "e2m1", 32)
    assert (data.shape, data.dtype, sf.shape) == ((0, 256), torch.int8, (0, 16))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_t01_packed_scales_of_a_short_batch(tokens):
    x = torch.randn(32, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = per_token_cast(x, "e4m3", 32, None, True, True, True)[1]
    assert torch.equal(per_token_cast(x[:tokens], "e4m3", 32, None, True, True, True)[1], whole[:tokens])


def test_t02_misaligned_view():
    buffer = torch.randn(129).bfloat16()
    view = buffer[1:].view(1, 128)
    data, sf = per_token_cast(view, "e4m3", 128)
    again, sf_again = per_token_cast(view.clone(), "e4m3", 128)
    assert torch.equal(codes(data), codes(again))
    assert torch.equal(sf, sf_again)


def test_t03_empty_dimensions():
    with pytest.raises(ValueError, match=r"^per_token_cast: x: expected H that is a positive multiple of 16, got 0$"):
        per_token_cast(torch.empty(128, 0), "e4m3", 128)
    data, sf = per_token_cast(torch.empty(4, 256)[:0, :128], "e4m3", 128, None, True)
    assert (data.shape, sf.shape, sf.stride(0)) == ((0, 128), (0, 1), 1)


def test_t04_rank():
    with pytest.raises(ValueError, match=r"^per_token_cast: x: expected shape \[T, H\], got \[128\]$"):
        per_token_cast(torch.ones(128), "e4m3", 128)


# -- contract -------------------------------------------------------------------------------------------------


def test_row_strided_input():
    x = torch.randn(7, 640)[:, 64:576]
    strided, dense = per_token_cast(x, "e4m3", 64), per_token_cast(x.contiguous(), "e4m3", 64)
    assert torch.equal(codes(strided[0]), codes(dense[0]))
    assert torch.equal(strided[1], dense[1])


@pytest.mark.parametrize("tokens", [4, 5])
def test_layouts(tokens):
    x = torch.randn(tokens, 512)
    plain = per_token_cast(x, "e4m3", 128, round_sf=True)
    column = per_token_cast(x, "e4m3", 128, None, True, True)
    packed = per_token_cast(x, "e4m3", 128, None, True, True, True)
    assert plain[1].stride() == (4, 1)
    assert column[1].stride() == packed[1].stride() == (1, 8 if tokens == 5 else 4)
    assert packed[1].shape == (tokens, 1)
    assert torch.equal(plain[1], column[1])
    exponents = (bits(plain[1]) >> 23) << torch.arange(0, 32, 8)
    assert torch.equal(packed[1][:, 0], exponents.to(torch.int32).sum(1, dtype=torch.int64).to(torch.int32))
    assert torch.equal(codes(plain[0]), codes(packed[0]))


@pytest.mark.parametrize("npc", [16, 128, 576])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_scales_alone(npc, fmt):
    x = torch.randn(5, 576)
    for flags in [(), (None, True), (None, True, True, True)]:
        expected = per_token_cast(x, fmt, npc, *flags)[1]
        found = per_token_cast_with_sf_only(x, fmt, npc, *flags)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_preallocated_results_are_used_and_nothing_else_is_written():
    x = torch.randn(3, 576)
    guarded = torch.full((3 * 576 + 32,), 0x55, dtype=torch.uint8)
    data = guarded[16:-16].view(3, 576).view(torch.float8_e4m3fn)
    sf = torch.full((3 * 5 + 2,), -1.0)
    out = (data, sf[1:-1].view(3, 5))
    found = per_token_cast(x, "e4m3", 128, out=out)
    assert found[0] is data
    assert found[1] is out[1]
    expected = per_token_cast(x, "e4m3", 128)
    assert torch.equal(codes(data), codes(expected[0]))
    assert torch.equal(out[1], expected[1])
    assert guarded[:16].tolist() == guarded[-16:].tolist() == [0x55] * 16
    assert sf[0] == sf[-1] == -1


def test_fake_tensors():
    with FakeTensorMode():
        data, sf = per_token_cast(torch.empty(5, 7168, dtype=torch.bfloat16), "e4m3", 128, None, True, True, True)
    assert (data.shape, data.dtype) == ((5, 7168), torch.float8_e4m3fn)
    assert (sf.shape, sf.dtype, sf.stride()) == ((5, 14), torch.int32, (1, 8))


X = torch.ones(2, 128)
PAIR = (torch.zeros(2, 128, dtype=torch.float8_e4m3fn), torch.ones(2, 1))


@pytest.mark.parametrize(
    ("error", "args", "options", "message"),
    [
        (TypeError, (X.half(), "e4m3", 128), {}, "x: expected dtype bfloat16 or float32, got float16"),
        (
            TypeError,
            ([X], "e4m3", 128),
            {},
            "x: expected a torch.Tensor or a (data, sf) pair of tensors, got a list of 1",
        ),
        (ValueError, (X, "e3m4", 128), {}, "fmt: expected 'e4m3' or 'e2m1' or 'e5m6', got 'e3m4'"),
        (ValueError, (X, "e4m3", 48), {}, "num_per_channels: expected 16, 32, 64, 128 or H = 128, got 48"),
        (ValueError, (X[:, :100], "e4m3", 100), {}, "x: expected H that is a positive multiple of 16, got 100"),
        (
            ValueError,
            (X.t(), "e4m3", 2),
            {},
            "x: expected rows with stride(-1) == 1 that do not overlap, got strides [1, 128]",
        ),
        (ValueError, (X, "e4m3", 128, (1, 128)), {}, "x_block_size: expected None, as x has no scales, got [1, 128]"),
        (
            ValueError,
            (PAIR, "e4m3", 128),
            {},
            "x_block_size: expected the (rows, columns) of a block of x[1], got None",
        ),
        (
            ValueError,
            (PAIR, "e4m3", 128, (1, 20)),
            {},
            "x_block_size: expected positive (rows, columns), columns a multiple of 8, got (1, 20)",
        ),
        (
            ValueError,
            (PAIR, "e4m3", 128, (1, 64)),
            {},
            "x[1]: expected shape [2, 2] (float32 scales of 2 x 2 blocks), got [2, 1]",
        ),
        (
            TypeError,
            ((X, PAIR[1]), "e4m3", 128, (1, 128)),
            {},
            "x[0]: expected dtype float8_e4m3fn or int8, got float32",
        ),
        (
            TypeError,
            ((PAIR[0], PAIR[1].half()), "e4m3", 128, (1, 128)),
            {},
            "x[1]: expected dtype float32 or int32 or float8_e4m3fn, got float16",
        ),
        (
            ValueError,
            (PAIR, "e5m6", 128, (1, 128)),
            {},
            "x: expected plain values with fmt 'e5m6', got a (data, sf) pair",
        ),
        (ValueError, (X, "e5m6", 64), {}, "num_per_channels: expected H = 128, got 64"),
        (ValueError, (X, "e5m6", 128), {"use_e4m3_sf": True}, "use_e4m3_sf: expected False with fmt 'e5m6', got True"),
        (
            ValueError,
            (X, "e4m3", 128),
            {"out": (PAIR[0], torch.ones(1, 2).t()[:1])},
            "out[1]: expected shape [2, 1], got [1, 1]",
        ),
        (TypeError, (X, "e4m3", 128), {"out": (X, PAIR[1])}, "out[0]: expected dtype float8_e4m3fn, got float32"),
    ],
)
def test_messages(error, args, options, message):
    with pytest.raises(error) as caught:
        per_token_cast(*args, **options)
    assert str(caught.value) == f"per_token_cast: {message}"


def test_out_needs_room_for_the_padding_rows():
    out = (torch.empty(3, 256, dtype=torch.float8_e4m3fn), torch.empty(7).as_strided((3, 2), (1, 4)))
    with pytest.raises(ValueError, match=r"out\[1\]: expected storage of 8 elements, got 7"):
        per_token_cast(torch.ones(3, 256), "e4m3", 128, None, True, out=out)


# -- stochastic rounding --------------------------------------------------------------------------------------

MANY = 4096


@pytest.mark.parametrize(
    ("fmt", "npc", "value", "down", "up"),
    [
        ("e4m3", 128, 1.0 + 0.125 * 0.75, 1.0, 1.125),
        ("e4m3", 128, -(2.0**-9) * 2.1, -(2.0**-8), -3 * 2.0**-9),
        ("e2m1", 128, 2.25, 2.0, 3.0),
        ("e2m1", 32, -0.2, 0.0, -0.5),
        ("e5m6", 128, 5.03125, 5.0, 5.0625),
        ("e5m6", 128, 2.0**-20 * 1.5, 2.0**-20, 2.0**-19),
    ],
)
def test_stochastic_mean_is_the_value(fmt, npc, value, down, up):
    x = torch.full((MANY, 128), value)
    x[:, ::npc] = {"e4m3": 448.0, "e2m1": 6.0, "e5m6": 65024.0}[fmt]  # scale 1
    data, sf = per_token_cast(x, fmt, npc, stochastic_cast=True, seed=11)
    assert sf.unique().item() == 1.0
    found = per_token_cast_back((data, sf), "fp32", npc, "e5m6" if fmt == "e5m6" else None)
    found = found[:, 1:2].double() if npc == 128 else found[:, 1:npc].double()
    assert set(found.unique().tolist()) == {down, up}
    share, fraction = (found == up).double().mean().item(), (value - down) / (up - down)
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / found.numel()) ** 0.5


@pytest.mark.parametrize(("fmt", "npc"), [("e4m3", 32), ("e2m1", 16), ("e5m6", 512)])
def test_stochastic_is_one_of_the_neighbours_and_unbiased(fmt, npc):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    special = "e5m6" if fmt == "e5m6" else None

    def back(**how):
        return per_token_cast_back(per_token_cast(x, fmt, npc, **how), "fp32", npc, special)

    nearest, many = back(), torch.stack([back(stochastic_cast=True, seed=seed) for seed in range(32)])
    error, limit = (many.mean(0) - x).abs().mean(), (nearest - x).abs().mean()
    assert error < 0.5 * limit  # the errors of rounding to nearest do not average out
    assert ((many == many.amin(0)) | (many == many.amax(0))).all()


def test_stochastic_keeps_exact_values_scales_and_limits():
    x = row(448.0, 1.0, 1.125, -0.0, 2.0**-9, NAN, 0.3125)
    data, sf = per_token_cast(x, "e4m3", 128, stochastic_cast=True, seed=0)
    expected = per_token_cast(x, "e4m3", 128)
    assert torch.equal(codes(data), codes(expected[0]))
    assert torch.equal(sf, expected[1])
    assert torch.equal(sf, per_token_cast_with_sf_only(x, "e4m3", 128, stochastic_cast=True))


def test_stochastic_bits_follow_the_seed():
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))

    def calls(seed):
        rand.set_seed(seed)
        return torch.stack([codes(per_token_cast(x, "e4m3", 128, stochastic_cast=True)[0]) for _ in range(2)])

    first, again = calls(5), calls(5)
    rand.set_seed(0)
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])


def test_stochastic_with_given_scales():
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    for fmt in ("e4m3", "e2m1"):
        data, sf = per_token_cast(x, fmt, 32, round_sf=True, stochastic_cast=True, seed=3)
        given = per_token_cast_with_precomputed_sf(x, fmt, 32, sf, stochastic_cast=True, seed=3)
        assert torch.equal(codes(given), codes(data))


def test_scales_alone_start_early_where_the_device_holds_all_blocks():
    op = per_token_cast_with_sf_only.operator
    early = {}
    for tokens in (64, 584, 588, 4096):
        x = torch.empty(tokens, 7168, dtype=torch.bfloat16, device="meta")
        early[tokens] = op.plan(*op.bind(x, "e4m3", 128)).launches[0].pdl
    assert early == {64: True, 584: True, 588: False, 4096: False}


def test_a_traced_number_of_rows_is_not_compared():
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    traced = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(4096, 7168, dtype=torch.bfloat16), symbolic_context=traced)
    with mode:
        assert per_token_cast_with_sf_only(x, "e4m3", 128).shape[1] == 56
    assert not shapes.guards
