"""The fused forms before a sublayer: equal to their chain bit for bit, ownership, options, messages."""

import functools

import pytest
import torch
from mhc_inputs import bf16, f32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tk_serving import mhc, quant
from tk_serving.mhc import _fused, _partials
from tk_serving.operator import find

GATES = {
    "rms_eps": 1e-6,
    "mhc_pre_eps": 1e-5,
    "mhc_sinkhorn_eps": 1e-4,
    "mhc_post_mult_value": 2.0,
    "sinkhorn_repeat": 5,
}


def parameters(hidden=192):
    return f32(24, 4 * hidden) / (4 * hidden) ** 0.5, f32(3, seed=2), f32(24, seed=3)


def chain(call, residual, fn, scale, base, weight=None, n_splits=16):
    """(post, comb, layer input, pre) by the single operators; ``call(name, *args)``."""
    mixes = call("mhc_pre_norm_fn", residual, fn, weight, GATES["rms_eps"], True, n_splits)
    pre, post, comb = call("mhc_pre_split_mixes", mixes, scale, base, 4, 2.0, GATES["mhc_pre_eps"])
    comb = call("sinkhorn_normalize", comb, GATES["sinkhorn_repeat"], GATES["mhc_sinkhorn_eps"])
    return post, comb, call("mhc_pre_apply_mix", residual, pre), pre


@pytest.fixture
def call(implementation):
    return lambda name, *args, **options: find(name).call(implementation, *args, **options)


@pytest.mark.parametrize("folded", [False, True])
def test_equals_its_chain(call, folded):
    residual, weight = bf16(3, 7, 4, 192), f32(768, seed=4) if folded else None
    fused = call("mhc_pre_big_fuse", residual, *parameters(), **GATES, norm_weight=weight, with_pre_mix=True)
    expected = chain(call, residual, *parameters(), weight)
    assert len(fused) == 4
    assert all(torch.equal(a, b) for a, b in zip(fused, expected, strict=True))


def test_results_without_the_pre_mix(call):
    results = call("mhc_pre_big_fuse", bf16(2, 4, 64), *parameters(64), **GATES)
    assert [tuple(t.shape) for t in results] == [(2, 4, 1), (2, 4, 4), (2, 64)]


def test_a_row_does_not_depend_on_its_batch():
    residual = bf16(70, 4, 192)  # few tokens take other paths through both kernels
    op = find("mhc_pre_big_fuse")
    whole = op.call("simulator", residual, *parameters(), **GATES)
    for tokens in (1, 3, 17, 65):
        part = op.call("simulator", residual[:tokens], *parameters(), **GATES)
        assert all(torch.equal(a, b[:tokens]) for a, b in zip(part, whole, strict=True))


def test_behind_an_external_product(call):
    residual, (fn, scale, base) = bf16(5, 4, 192), parameters()
    mul, sqr = call("mhc_pre_norm_gemm", residual, fn)
    post, comb, row = torch.empty(5, 4, 1), torch.empty(5, 4, 4), torch.empty(5, 192, dtype=torch.bfloat16)
    call("mhc_pre_big_fuse_fwd", mul, sqr, scale, base, residual, post, comb, row, **GATES, n_splits=mul.shape[0])
    expected = call("mhc_pre_big_fuse", residual, fn, scale, base, **GATES)
    assert all(torch.equal(a, b) for a, b in zip((post, comb, row), expected, strict=True))


def test_number_of_external_parts_must_agree():
    args = f32(3, 5, 24), f32(3, 5), *parameters()[1:], bf16(5, 4, 64)
    results = torch.empty(5, 4, 1), torch.empty(5, 4, 4), bf16(5, 64)
    with pytest.raises(ValueError, match="n_splits: expected 3, the parts of gemm_out_mul, got 16"):
        mhc.mhc_pre_big_fuse_fwd(*args, *results, **GATES)


def test_forward_only():
    residual = bf16(2, 4, 64).requires_grad_()
    for name in ("mhc_pre_big_fuse", "mhc_pre_fused"):
        with pytest.raises(RuntimeError, match=f"{name}: forward only"):
            getattr(mhc, name)(residual, *parameters(64), **GATES)
    with torch.no_grad():
        mhc.mhc_pre_big_fuse(residual, *parameters(64), **GATES)


def norm(row, weight, eps):
    value = row.float()
    return (value / (value.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm(call, dtype):
    residual, weight = bf16(2, 3, 4, 192), f32(192, seed=5).to(dtype)
    fused = call("mhc_pre_fused", residual, *parameters(), **GATES, norm_weight=weight, norm_eps=1e-2)
    post, comb, row = call("mhc_pre_big_fuse", residual, *parameters(), **GATES)
    assert torch.equal(fused[0], post)
    assert torch.equal(fused[1], comb)
    torch.testing.assert_close(fused[2], norm(row, weight, 1e-2), rtol=2**-7, atol=0)
    assert fused[3:] == (None, None)


TIE = {**GATES, "mhc_pre_eps": 2**-9 + 2**-16}
"""With gates of 1/2 before it, four streams of 1/2 sum to 1 + 2^-8 + 2^-15: in bfloat16 1 + 2^-7."""


def halves(tokens):
    return torch.full((tokens, 4, 192), 0.5).bfloat16(), parameters()[0], torch.zeros(3), torch.zeros(24)


@pytest.mark.parametrize("fmt", [None, "e4m3"])
@pytest.mark.parametrize("tokens", [3, 70])
def test_rms_before_rounding(call, tokens, fmt):
    """Divided by its own RMS and times 1.5 the row is 1.5; by that before rounding 1.5059, in bfloat16 1.5078."""
    options = {"norm_weight": torch.full((192,), 1.5), "norm_eps": 0.0, "fmt": fmt, "with_out_bf16": fmt is not None}
    for before, expected in ((False, 1.5), (True, 1.5078125)):
        fused = call("mhc_pre_fused", *halves(tokens), **TIE, **options, rms_before_rounding=before)
        assert fused.layer_input.eq(expected).all()


def test_rms_before_rounding_behind_an_update(call):
    residual, *parameters = halves(9)
    update = bf16(9, 192), residual, torch.zeros(9, 4, 1), torch.eye(4).expand(9, 4, 4).contiguous()
    options = {"norm_weight": torch.full((192,), 1.5), "norm_eps": 0.0, "rms_before_rounding": True}
    fused = call("mhc_post_pre_fused", *update, *parameters, **TIE, **options)
    assert torch.equal(fused.residual, residual)
    assert fused.layer_input.eq(1.5078125).all()


LAYOUTS = {
    "row": {},
    "column": {"use_tma_aligned_col_major_sf": True},
    "packed": {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("npc", [32, 128])
def test_cast(call, layout, npc):
    """The quantised form is per_token_cast of the bfloat16 one, bit for bit, with H no multiple of the group."""
    options = {"fmt": "e4m3", "num_per_channels": npc, **LAYOUTS[layout], "with_out_bf16": True}
    weight = f32(192, seed=5)
    fused = call("mhc_pre_fused", bf16(5, 4, 192), *parameters(), **GATES, norm_weight=weight, **options)
    data, sf = fused.quantized
    expected = quant.per_token_cast(fused.layer_input, "e4m3", npc, None, **LAYOUTS[layout])
    assert torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(sf, expected[1])
    assert sf.stride() == expected[1].stride()
    if layout != "row":
        whole = sf.as_strided((sf.shape[1], sf.stride(1)), (sf.stride(1), 1))
        assert whole[:, 5:].eq(0).all()


def test_cast_alone_returns_no_bfloat16(call):
    fused = call("mhc_pre_fused", bf16(5, 4, 192), *parameters(), **GATES, fmt="e4m3")
    assert fused.layer_input is None
    assert fused.quantized[0].dtype == torch.float8_e4m3fn
    assert fused.pre_mix is None


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_delayed_pre_mix(call, first, normed):
    residual, mix = bf16(5, 4, 192), None if first else f32(5, 4, 1, seed=6)
    weight = f32(192, seed=5) if normed else None
    options = {"delayed": True, "pre_mix": mix, "norm_weight": weight}
    fused = call("mhc_pre_fused", residual, *parameters(), **GATES, **options)
    post, comb, _, pre = call("mhc_pre_big_fuse", residual, *parameters(), **GATES, with_pre_mix=True)
    row = residual[:, 0] if first else call("mhc_pre_apply_mix", residual, mix)
    assert torch.equal(fused.post, post)
    assert torch.equal(fused.comb, comb)
    assert torch.equal(fused.pre_mix, pre)
    if normed:
        torch.testing.assert_close(fused.layer_input, norm(row, weight, 1e-6), rtol=2**-7, atol=0)
    else:
        assert torch.equal(fused.layer_input, row)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("options", ["plain", "norm", "cast", "delayed"])
def test_update_fused_with_the_next_input(call, options, apart, monkeypatch):
    if apart:  # as the largest streams are
        monkeypatch.setattr(_fused, "APART", (192, 2 * 9))
    x, residual = bf16(2, 9, 192, seed=7), bf16(2, 9, 4, 192)
    post, comb = f32(2, 9, 4, 1, seed=8), f32(2, 9, 4, 4, seed=9)
    form = {
        "plain": {},
        "norm": {"norm_weight": f32(192, seed=5)},
        "cast": {"fmt": "e4m3", "with_out_bf16": True},
        "delayed": {"delayed": True, "pre_mix": f32(2, 9, 4, 1, seed=6), "norm_weight": f32(192, seed=5)},
    }[options]
    update = x, residual, post, comb
    op = find("mhc_post_pre_fused")
    assert len(op.plan(*op.bind(*update, *parameters(), **GATES, **form)).launches) == 2 + apart
    fused = call("mhc_post_pre_fused", *update, *parameters(), **GATES, **form)
    updated = call("mhc_post", x, residual, post, comb)
    expected = call("mhc_pre_fused", updated, *parameters(), **GATES, **form)
    assert torch.equal(fused.residual, updated)
    for name, want in expected._asdict().items():
        got = getattr(fused, name)
        if name == "quantized" and want is not None:
            got, want = (torch.cat([data.float(), sf], dim=1) for data, sf in (got, want))
        assert got is want is None or torch.equal(got, want), name


@pytest.mark.parametrize("weight", [None, torch.bfloat16])
def test_head(call, weight):
    residual, fn, scale, base = bf16(3, 5, 4, 192), f32(4, 768) / 28, f32(1, seed=2), f32(4, seed=3)
    weight = None if weight is None else f32(192, seed=4).to(weight)
    fused = call("mhc_head_fused", residual, fn, scale, base, 1e-6, 1e-5, norm_weight=weight, norm_eps=1e-3)
    mix = call("mhc_head_compute_mix", call("mhc_pre_norm_fn", residual, fn, None, 1e-6), scale, base, 1e-5)
    row = call("mhc_pre_apply_mix", residual, mix.unsqueeze(-1))
    if weight is None:
        assert torch.equal(fused, row)
    else:
        torch.testing.assert_close(fused, norm(row, weight, 1e-3), rtol=2**-7, atol=0)


def test_no_tokens():
    options = {"fmt": "e4m3", "use_tma_aligned_col_major_sf": True, "delayed": True}
    fused = mhc.mhc_pre_fused(bf16(0, 4, 192), *parameters(), **GATES, **options)
    data, sf = fused.quantized
    assert (data.shape, sf.shape, sf.stride(0)) == ((0, 192), (0, 2), 1)
    assert fused.pre_mix.shape == (0, 4, 1)
    assert mhc.mhc_head_fused(bf16(0, 4, 64), f32(4, 256), f32(1), f32(4), 1e-6, 1e-6).shape == (0, 64)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fn": f32(4, 256)}, ValueError, r"fn: expected shape \[24, 256\], got \[4, 256\]"),
        ({"mhc_scale": f32(1)}, ValueError, r"mhc_scale: expected shape \[3\], got \[1\]"),
        ({"sinkhorn_repeat": 0}, ValueError, "sinkhorn_repeat: expected at least 1, got 0"),
        ({"fmt": "e2m1"}, ValueError, "fmt: expected 'e4m3', got 'e2m1'"),
        ({"fmt": "e4m3", "num_per_channels": 64}, ValueError, "num_per_channels: expected 32 or 128, got 64"),
        ({"fmt": "e4m3", "use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0"),
        ({"round_sf": True}, ValueError, "round_sf: expected False, as there is no fmt, got True"),
        ({"pre_mix": f32(2, 4, 1)}, ValueError, "pre_mix: expected None, as the pre mix is not delayed"),
        ({"rms_before_rounding": True}, ValueError, "rms_before_rounding: expected False, as there is no norm_weight"),
        (
            {"rms_before_rounding": True, "norm_weight": f32(64), "delayed": True},
            ValueError,
            "rms_before_rounding: expected False, as the pre mix is delayed",
        ),
        ({"norm_weight": f32(256)}, ValueError, r"norm_weight: expected shape \[64\], got \[256\]"),
        ({"norm_weight": f32(64).half()}, TypeError, "norm_weight: expected dtype bfloat16 or float32, got float16"),
    ],
)
def test_refused(options, error, message):
    fn, scale, base = parameters(64)
    arguments = {"residual": bf16(2, 4, 64), "fn": fn, "mhc_scale": scale, "mhc_base": base, **GATES}
    with pytest.raises(error, match=f"mhc_pre_fused: {message}"):
        mhc.mhc_pre_fused(**arguments | options)


def test_the_update_is_checked():
    call = functools.partial(mhc.mhc_post_pre_fused, bf16(2, 64), bf16(2, 4, 64))
    with pytest.raises(
        ValueError, match=r"mhc_post_pre_fused: comb_res_mix: expected shape \[2, 4, 4\], got \[2, 4, 1\]"
    ):
        call(f32(2, 4, 1), f32(2, 4, 1), *parameters(64), **GATES)


@pytest.mark.parametrize("name", ["mhc_pre_big_fuse", "mhc_pre_fused"])
def test_the_widest_streams_launch_late_in_large_batches(name):
    op = find(name)

    def early(size, tokens):
        args = (
            torch.empty(tokens, 4, size, dtype=torch.bfloat16, device="meta"),
            torch.empty(24, 4 * size, device="meta"),
        )
        gates = torch.empty(3, device="meta"), torch.empty(24, device="meta")
        return {launch.pdl for launch in op.plan(*op.bind(*args, *gates, **GATES)).launches}

    size, tokens = _partials.LATE
    assert early(size, tokens) == {False}
    assert early(size, tokens - 1) == early(size - 64, tokens) == {True}


@pytest.mark.parametrize("name", ["mhc_pre_big_fuse", "mhc_pre_fused"])
def test_a_traced_number_of_tokens_is_not_compared(name):
    size, tokens = _partials.LATE
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    traced = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    streams = torch.empty(tokens, 4, size, dtype=torch.bfloat16)
    residual = mode.from_tensor(streams, symbolic_context=traced)
    with mode:
        find(name).public(residual, torch.empty(24, 4 * size), torch.empty(3), torch.empty(24), **GATES)
    assert not shapes.guards
