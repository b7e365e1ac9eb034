"""SwiGLU, plain and quantised: public faults, row treatment, counters, messages."""

from dataclasses import replace

import pytest
import torch
from harness import check

from tk_serving import config, dispatch, kept
from tk_serving.compile import kernels
from tk_serving.quant import (
    gating,
    per_token_cast,
    swiglu_forward,
    swiglu_forward_and_per_token_cast,
    swiglu_forward_and_per_token_cast_grouped,
)

NAN = float("nan")


def codes(data):
    return data.view(torch.uint8)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def alignment():
    saved = config.get_token_alignment()
    yield config.set_token_alignment
    config.set_token_alignment(saved)


# -- public faults --------------------------------------------------------------------------------------------


def test_s01_the_gate_has_an_upper_limit_only():
    x = torch.tensor([[20.0, -20.0] + [0.0] * 6 + [20.0, -20.0] + [0.0] * 6])
    y = swiglu_forward(x, "fp32", clamp_value=10.0)[0, :2]
    assert torch.allclose(y, torch.tensor([99.99546, 4.1223e-7]), rtol=1e-5, atol=0)


def test_s02_limits_come_before_the_scale():
    x = torch.cat((torch.full((1, 128), 1000.0), torch.ones(1, 128)), 1)
    data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", 128, swiglu_clamp_value=10.0)
    assert abs(sf.item() - 0.0223204) < 1e-7
    assert codes(data).unique().tolist() == [0x7E]


@pytest.mark.parametrize("garbage", [3e38, NAN])
def test_s03_garbage_in_padding_rows(garbage):
    x = torch.full((8, 256), garbage)
    x[:3] = 1.0
    owners = i32(0, 0, 0, -1, -1, -1, -1, -1)
    data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", 128, pos_to_expert=owners)
    assert torch.allclose(sf[:3], torch.tensor(0.00163183), rtol=1e-5, atol=0)
    assert codes(data)[:3].unique().tolist() == [0x7E]
    assert not bool(codes(data)[3:].any())
    assert not bool(sf[3:].any())
    clean = torch.where(torch.arange(8)[:, None] < 3, x, 0.0)
    again = swiglu_forward_and_per_token_cast(clean, "e4m3", 128, pos_to_expert=owners)
    assert torch.equal(codes(again[0]), codes(data))
    assert torch.equal(again[1], sf)


@pytest.mark.parametrize("garbage", [float("inf"), NAN])
def test_q14_rows_without_a_token_are_zeros_whatever_they_hold(garbage):
    x = torch.full((2, 256), garbage)
    weights = torch.full((1, 2), NAN)
    data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", 128, i32(-1, 2), weights, round_sf=True)
    assert not bool(codes(data).any())
    assert sf.tolist() == [[2.0**-22], [2.0**-22]]


def test_q16_scales_of_padding_rows():
    owners = i32(0, -1, -1, -1, 1, -1, -1, -1)
    for packed in (False, True):
        sf = swiglu_forward_and_per_token_cast(
            torch.randn(8, 1024), "e4m3", 128, None, None, owners, True, True, packed
        )[1]
        if packed:
            assert not bool(sf[owners < 0].any())
        else:
            assert bool((sf.contiguous().view(torch.int32) & 0x807FFFFF == 0).all())
            assert not bool(sf[owners < 0].any())


# -- values ---------------------------------------------------------------------------------------------------


def test_order_of_the_operations():
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    gate, up = x[:, :256], x[:, 256:]
    weights = torch.tensor([[0.3, 0.7], [0.1, 1.9]])
    y = (gate / (1 + torch.exp(-gate))) * up * torch.tensor([[1.9], [0.3], [0.1], [0.7]])
    found = swiglu_forward_and_per_token_cast(x, "e4m3", 64, i32(3, 0, 2, 1), weights)
    expected = per_token_cast(y, "e4m3", 64)
    assert torch.equal(codes(found[0]), codes(expected[0]))
    assert torch.equal(found[1], expected[1])
    plain = swiglu_forward(x, "fp32", topk_weights=torch.tensor([1.9, 0.3, 0.1, 0.7]))
    assert torch.equal(plain, y)


def test_routed_scaling_factor_multiplies_the_weight_first():
    x = torch.randn(2, 32)
    weights = torch.tensor([0.1, 0.7])
    y = swiglu_forward(x, "fp32")
    effective = weights * torch.tensor(2.5)
    assert torch.equal(swiglu_forward(x, "fp32", None, weights, 2.5), y * effective[:, None])
    assert torch.equal(swiglu_forward(x, "fp32", None, None, 2.5), y * 2.5)


def test_nan_stays_in_both_forms_and_infinities_follow_the_formula():
    x = torch.ones(1, 256)
    x[0, 3] = NAN
    x[0, 128 + 7] = NAN
    x[0, 9] = -float("inf")
    for clamp in (None, 10.0):
        data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", 128, swiglu_clamp_value=clamp)
        assert (codes(data)[0] == 0x7F).nonzero().flatten().tolist() == [3, 7, 9]
        assert abs(sf.item() - 0.00163183) < 1e-7


def test_bf16_target_is_rounded_once():
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(swiglu_forward(x, "bf16"), swiglu_forward(x, "fp32").bfloat16())


def test_an_activation_in_bfloat16_is_rounded_twice():
    gate, up = torch.randn(2, 32, 128).mul(3).bfloat16()
    x = torch.cat((gate, up), 1)
    silu = (gate.float() / (1.0 + torch.exp(-gate.float()))).bfloat16()
    y = swiglu_forward(x, "bf16", round_activation=True)
    assert torch.equal(y, silu * up)
    assert not torch.equal(y, swiglu_forward(x, "bf16"))
    found = swiglu_forward_and_per_token_cast(x, "e4m3", 128, round_activation=True)
    for got, want in zip(found, per_token_cast(y, "e4m3", 128), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_the_kernel_rounds_the_activation_twice_as_well():
    x = torch.randn(4, 1024).mul(3).bfloat16()
    op = swiglu_forward.operator
    rounded, plain = (
        dispatch.run(op, op.plan(*args), args, x.device, "simulator")[0]
        for args in (op.bind(x, "bf16", round_activation=True), op.bind(x, "bf16"))
    )
    expected = swiglu_forward(x, "bf16", round_activation=True)
    assert (rounded != expected).sum() <= 1  # the host's exp may be a step off
    assert (plain != expected).sum() > 100


@pytest.mark.parametrize("shared_rows", [32, 128])
@pytest.mark.parametrize("column_major", [False, True])
def test_the_kernel_finds_the_live_rows_among_padding(column_major, shared_rows, monkeypatch):
    """None, one, five, or all of 32 rows, more than the warps of a block and fewer."""
    monkeypatch.setattr(gating, "LISTED_ROWS", range(1000 if shared_rows == 128 else 0))
    monkeypatch.setattr(gating, "LISTED_COLUMNS", 0)
    owners = torch.full((129,), -1, dtype=torch.int32)
    live = torch.tensor([37, *(64, 65, 70, 80, 95), *range(96, 129)])
    owners[live] = 1
    positions = torch.randperm(129, dtype=torch.int32) - 1  # one of them names no token
    x = torch.randn(129, 512).mul(3).bfloat16()
    op = swiglu_forward_and_per_token_cast.operator
    args = op.bind(
        *(x, "e4m3", 128, positions, torch.rand(16, 8), owners),
        use_tma_aligned_col_major_sf=column_major,
        zero_padding=False,
    )
    data, sf = dispatch.run(op, op.plan(*args), args, x.device, "simulator")[:2]
    expected, expected_sf = op.call("reference", *args)
    assert torch.allclose(sf, expected_sf, rtol=1e-6, atol=0)
    assert (codes(data)[live] != codes(expected)[live]).sum() <= 4  # the host's exp may be a step off


FORMS = [case for case in swiglu_forward_and_per_token_cast.operator.cases if case["tokens"] and case["npc"] <= 128]


@pytest.mark.parametrize("case", FORMS, ids=range(len(FORMS)))
def test_the_forms_for_many_rows(case, monkeypatch):
    """Of few rows as well, with the same bytes."""
    monkeypatch.setattr(gating, "FEW_ROWS", 0)
    monkeypatch.setattr(gating, "LISTED_ROWS", range(1000))
    monkeypatch.setattr(gating, "LISTED_COLUMNS", 0)
    check(swiglu_forward_and_per_token_cast.operator, "simulator", case)


def test_the_form_follows_the_rows():
    op, config_ = swiglu_forward_and_per_token_cast.operator, {}
    for rows in (64, 65, 32767, 32768, 38400, 38401):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
        experts = torch.empty(rows, dtype=torch.int32, device="meta")
        for zero_padding in (False, True):
            bound = op.bind(x, "e4m3", 128, pos_to_expert=experts, zero_padding=zero_padding)
            config_[rows, zero_padding] = op.plan(*bound).launches[0].config
    assert [config_[rows, True]["halves"] for rows in (64, 65, 32768)] == [1, 2, 2]
    shared = [config_[rows, False]["shared_rows"] for rows in (64, 32767, 32768, 38400, 38401)]
    assert shared == [32, 32, 128, 128, 32]
    assert all(config_[rows, True]["shared_rows"] == 0 for rows in (64, 32768))


def simulated(function, *args, **options):
    op = function.operator
    given, named = dispatch.args_by_kind(op, op.bind(*args, **options))
    return op.call("simulator", *given, **named)


@pytest.mark.parametrize("clamp", [0.5, 10.0])
def test_the_form_with_fewer_instructions_gives_the_same_bits(clamp):
    gates = torch.randn(9, 640) * 40
    gates[0, ::7], gates[1, ::5], gates[2, 3], gates[3] = NAN, float("inf"), -float("inf"), -0.0
    x = torch.cat((gates, torch.randn(9, 640) * 20), dim=1).bfloat16()
    weights = torch.tensor([1.5, -3.0, NAN, 0.0, 2.0**64, -(2.0**65), 1e-40, float("inf"), 0.3])
    layout = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    positions = torch.arange(9, dtype=torch.int32)
    data, sf = simulated(
        swiglu_forward_and_per_token_cast_grouped, x, "e4m3", 32, None, weights, clamp_value=clamp, **layout
    )
    expected, expected_sf = simulated(
        swiglu_forward_and_per_token_cast,
        x,
        "e4m3",
        32,
        positions,
        weights[:, None],
        swiglu_clamp_value=clamp,
        **layout,
    )
    assert torch.equal(codes(data), codes(expected))
    assert torch.equal(sf, expected_sf)


@pytest.mark.parametrize(("clamp", "lean"), [(10.0, True), (10.1, False), (None, False), (2.0**32, False)])
def test_only_limits_that_are_a_bfloat16_have_the_form_with_fewer_instructions(clamp, lean):
    op = swiglu_forward.operator
    bound = op.bind(torch.empty(100, 512, dtype=torch.bfloat16, device="meta"), "bf16", clamp_value=clamp)
    assert op.plan(*bound).launches[0].config.get("lean", False) == lean


def test_pairs_are_limited_once():
    op = swiglu_forward.operator
    bound = op.bind(torch.empty(100, 512, dtype=torch.bfloat16, device="meta"), "bf16", clamp_value=10.0)
    (launch,) = op.plan(*bound).launches
    assert launch.config["lean"]
    source = kernels.cuda_source(launch, "sm_90a").partition("{")[2]
    assert source.count("tks_min_nan(") > 2
    assert "limit <" not in source  # as in the form that limits one value after the other
    assert "limit <" in kernels.cuda_source(replace(launch, config={**launch.config, "lean": False}), "sm_90a")


def test_no_routing_weight_is_loaded_ahead_where_there_is_none():
    x = torch.ones(3, 256)
    weights, positions = torch.empty(0, 2), torch.zeros(3, dtype=torch.int32)
    op = swiglu_forward_and_per_token_cast.operator
    data, sf = op.call("simulator", x, "e4m3", 128, positions, weights)
    assert not bool(codes(data).any())
    assert sf.unique().numel() == 1


def test_plans_hold_no_tensors_of_a_call():
    op = swiglu_forward_and_per_token_cast.operator
    bound = op.bind(torch.ones(2, 256), "e4m3", 128, i32(0, 1), torch.ones(2, 1), i32(0, -1))
    assert not list(kept._tensors(op.plan(*bound)))


def test_sf_clamp_min_replaces_the_floor():
    x = torch.zeros(1, 256)
    sf = swiglu_forward_and_per_token_cast(x, "e4m3", 128, sf_clamp_min=1e-10)[1]
    assert torch.equal(sf, torch.tensor([[1e-10]]) / torch.tensor([[448.0]]))
    sf = swiglu_forward_and_per_token_cast(x, "e4m3", 128, round_sf=True)[1]
    assert sf.item() == 2.0**-22


@pytest.mark.parametrize("npc", [32, 64, 128, 384])
def test_layouts(npc):
    x = torch.randn(5, 768)
    data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", npc)
    assert (data.shape, sf.shape, sf.stride()) == ((5, 384), (5, 384 // npc), (384 // npc, 1))
    if npc < 384:
        column = swiglu_forward_and_per_token_cast(x, "e4m3", npc, use_tma_aligned_col_major_sf=True)[1]
        assert column.stride() == (1, 8)
        assert torch.equal(column, sf)


def test_no_rows():
    data, sf = swiglu_forward_and_per_token_cast(torch.empty(0, 512), "e4m3", 128, use_tma_aligned_col_major_sf=True)
    assert (data.shape, sf.shape, sf.stride(0)) == ((0, 256), (0, 2), 1)
    assert swiglu_forward(torch.empty(0, 512), "bf16").shape == (0, 256)


# -- padding and counters -------------------------------------------------------------------------------------


def test_intervals_of_the_experts(alignment):
    """Experts own 3, 0 and 2 rows; each begins at a multiple of the alignment."""
    x = torch.full((14, 32), NAN)
    live = [0, 1, 2, 4, 5]
    x[live] = 1.0
    alignment(4)
    found = swiglu_forward(x, "fp32", i32(3, 3, 6))
    assert (found[:, 0] != 0).nonzero().flatten().tolist() == live
    assert not bool(found.isnan().any())
    alignment(1)
    found = swiglu_forward(torch.ones(14, 32), "fp32", i32(3, 3, 6))
    assert (found[:, 0] != 0).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_counters_add_strict_comparisons_of_unclamped_values():
    x = torch.zeros(3, 256)
    x[:, :4] = torch.tensor([10.0, 10.5, -11.0, NAN])
    x[:, 128:133] = torch.tensor([10.0, 11.0, -10.0, -10.5, NAN])
    counts = torch.tensor([5, 0, 2**40])
    owners = i32(0, -1, 3)
    swiglu_forward_and_per_token_cast(x, "e4m3", 128, None, None, owners, False, False, False, 10.0, counts)
    assert counts.tolist() == [7, 2, 2**40 + 2]
    swiglu_forward_and_per_token_cast(x, "e4m3", 128, swiglu_clamp_value=10.0, clamped_count=counts)
    assert counts.tolist() == [10, 5, 2**40 + 5]


def test_rows_without_a_token_are_counted():
    x = torch.full((2, 256), 20.0)
    counts = torch.zeros(3, dtype=torch.int64)
    swiglu_forward_and_per_token_cast(
        x, "e4m3", 128, i32(-1, 0), torch.ones(1, 1), swiglu_clamp_value=10.0, clamped_count=counts
    )
    assert counts.tolist() == [256, 256, 0]


def test_fourth_counter_is_the_number_of_elements(alignment):
    alignment(2)
    counts = torch.zeros(4, dtype=torch.int64)
    swiglu_forward(torch.full((5, 32), -3.0), "bf16", i32(1, 3), clamp_value=2.0, clamped_count=counts)
    assert counts.tolist() == [0, 0, 32, 32]


# -- messages -------------------------------------------------------------------------------------------------

X = torch.ones(2, 512)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"fmt": "e2m1"}, "fmt: expected 'e4m3', got 'e2m1'"),
        (ValueError, {"x": torch.ones(2, 448)}, "x: expected 2 H columns, H a positive multiple of 128, got 448"),
        (ValueError, {"x": torch.ones(2, 640)[:, :512]}, "x: expected a contiguous tensor, got strides [640, 1]"),
        (TypeError, {"x": X.half()}, "x: expected dtype bfloat16 or float32, got float16"),
        (ValueError, {"num_per_channels": 16}, "num_per_channels: expected 32, 64, 128 or H = 256, got 16"),
        (
            ValueError,
            {"pos_to_token_topk": i32(0, 1)},
            "topk_weights: expected a value, as pos_to_token_topk is given, got None",
        ),
        (
            ValueError,
            {"pos_to_token_topk": i32(0), "topk_weights": torch.ones(1, 1)},
            "pos_to_token_topk: expected shape [2], got [1]",
        ),
        (TypeError, {"pos_to_expert": torch.zeros(2)}, "pos_to_expert: expected dtype int32, got float32"),
        (ValueError, {"swiglu_clamp_value": 0.0}, "swiglu_clamp_value: expected a positive number, got 0.0"),
        (
            ValueError,
            {"clamped_count": torch.zeros(3, dtype=torch.int64)},
            "clamped_count: expected swiglu_clamp_value as well, got None",
        ),
        (
            ValueError,
            {"clamped_count": torch.zeros(4, dtype=torch.int64), "swiglu_clamp_value": 1.0},
            "clamped_count: expected shape [3], got [4]",
        ),
        (
            ValueError,
            {"num_per_channels": 256, "use_tma_aligned_col_major_sf": True},
            "use_tma_aligned_col_major_sf: expected False with num_per_channels = H, got True",
        ),
        (ValueError, {"sf_clamp_min": -1.0}, "sf_clamp_min: expected a positive number, got -1.0"),
        (
            ValueError,
            {"x": torch.ones(2, 512), "round_activation": True},
            "round_activation: expected False with float32 x, got True",
        ),
    ],
)
def test_messages_of_the_quantised_form(error, options, message):
    arguments = {"x": X, "fmt": "e4m3", "num_per_channels": 128} | options
    with pytest.raises(error) as caught:
        swiglu_forward_and_per_token_cast(**arguments)
    assert str(caught.value) == f"swiglu_forward_and_per_token_cast: {message}"


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"fmt": "e4m3"}, "fmt: expected 'bf16' or 'fp32', got 'e4m3'"),
        (ValueError, {"x": torch.ones(2, 24)}, "x: expected 2 H columns, H a positive multiple of 8, got 24"),
        (ValueError, {"topk_weights": torch.ones(1, 2)}, "topk_weights: expected shape [2], got [1, 2]"),
        (
            TypeError,
            {"psum_num_tokens_per_expert": torch.ones(2)},
            "psum_num_tokens_per_expert: expected dtype int32, got float32",
        ),
        (
            ValueError,
            {"clamped_count": torch.zeros(4, dtype=torch.int64)},
            "clamped_count: expected clamp_value as well, got None",
        ),
    ],
)
def test_messages_of_the_plain_form(error, options, message):
    arguments = {"x": X, "fmt": "bf16"} | options
    with pytest.raises(error) as caught:
        swiglu_forward(**arguments)
    assert str(caught.value) == f"swiglu_forward: {message}"


def test_padding_rows_are_no_traffic():
    op = swiglu_forward_and_per_token_cast.operator
    x = torch.ones(4, 512, dtype=torch.bfloat16)

    def moved(experts, **more):
        return op.compulsory_bytes(*op.bind(x, "e4m3", 128, pos_to_expert=experts, **more))

    every = 4 * (1024 + 256 + 2 * 4)
    assert moved(None) == every
    assert moved(i32(0, 1, 1, 2)) == every + 4 * 4
    assert moved(i32(0, -1, 1, -1)) == every + 4 * 4 - 2 * 1024
    assert moved(i32(0, -1, 1, -1), zero_padding=False) == every + 4 * 4 - 2 * (1024 + 256)
