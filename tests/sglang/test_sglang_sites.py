"""Every call site against SGLang's own code, or against its contract, on CPU tensors."""

import dataclasses
from types import SimpleNamespace

import declared_sites
import pytest
import torch
from torch import Tensor

from tk_serving import dispatch
from tk_serving.operator import find

pytest.importorskip("sglang.srt")

from tk_serving_patches import Ledger
from tk_serving_sglang.sites import SITES


@pytest.fixture(autouse=True)
def _counted(published):
    published()
    dispatch.reset_counters()
    yield
    dispatch.reset_counters()


@pytest.fixture
def applied():
    """Apply the site of a name for the length of a test."""
    ledger = Ledger()

    def apply(name, last=False):
        chosen = [s for s in SITES if s.name == name][-1 if last else 0]
        rows = ledger.apply(dataclasses.replace(chosen, unsuitable=lambda: None))
        assert {row.status for row in rows} == {"patched"}, rows

    yield apply
    ledger.revert()


def rows_of(operator):
    return [row for row in dispatch.counters() if row["operator"] == operator]


def ran(*operators):
    """Only these operators ran, none was left to SGLang."""
    counted = {row["operator"] for row in dispatch.counters() if row["implementation"] == "reference"}
    assert counted == set(operators), dispatch.counters()
    assert not [row for row in dispatch.counters() if row["implementation"] == "engine"]


def engine_reasons(operator):
    return [row["reason"] for row in rows_of(operator) if row["implementation"] == "engine"]


def normal(*shape, seed=0, gain=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * gain


# -- all sites -----------------------------------------------------------------------------------------------------


def test_sources_of_the_installed_sglang_are_those_that_were_tested():
    from tk_serving_sglang.activate import TESTED

    for chosen in SITES:
        assert chosen.sources.get(TESTED) == chosen.fingerprint(), chosen.name


def test_every_site_says_why_how_and_until_when_and_names_real_operators():
    declared_sites.check(SITES)


def test_the_model_tables_name_existing_sites():
    from tk_serving_patches.sglang import MODELS

    assert {name for names in MODELS.values() for name in names} == {s.name for s in SITES}


def test_every_site_can_be_applied_and_undone_together():
    ledger = Ledger()
    for chosen in SITES:
        rows = ledger.apply(dataclasses.replace(chosen, unsuitable=lambda: None))
        assert {row.status for row in rows} == {"patched"}, rows
    assert ledger.foreign() == []
    ledger.revert()
    for chosen in SITES:
        assert chosen.sources["0.5.23"] == chosen.fingerprint(), chosen.name


# -- routing -------------------------------------------------------------------------------------------------------

LOGITS = normal(37, 16, seed=3, gain=2.0)
BIAS = torch.linspace(-0.1, 0.1, 16)


def by_expert(weights: Tensor, ids: Tensor, experts: int = 17) -> Tensor:
    """[T, E] with the weight of every chosen expert: the order of the choices does not matter."""
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    return torch.zeros(ids.shape[0], experts).scatter_(1, ids.long(), weights)


def layer(**changes):
    from sglang.srt.layers.moe.topk import TopK

    options = {
        "top_k": 4,
        "layer_id": 0,
        "use_grouped_topk": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "renormalize": True,
        "routed_scaling_factor": 2.5,
        "correction_bias": BIAS,
        "scoring_func": "sigmoid",
    }
    return TopK(**{**options, **changes})


def route(topk):
    weights, ids, _ = topk(torch.zeros(37, 8), LOGITS)
    return by_expert(weights, ids)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_expert_group": 1, "topk_group": 1},
        {"apply_routed_scaling_factor_on_output": True},
        {"correction_bias": BIAS.bfloat16()},
    ],
)
def test_the_layer_of_v3_agrees_with_sglang(applied, changes):
    theirs = route(layer(**changes))
    applied("routing")
    torch.testing.assert_close(route(layer(**changes)), theirs)
    ran("top2_sum_gate")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"renormalize": False}, "weights are not normalised")],
)
def test_other_biased_routers_stay_with_sglang(applied, changes, reason):
    theirs = route(layer(**changes))
    applied("routing")
    assert torch.equal(route(layer(**changes)), theirs)
    assert engine_reasons("top2_sum_gate") == [reason]


@pytest.mark.parametrize("scaled", [False, True])
def test_shared_experts_among_the_routed_ones(applied, scaled):
    from sglang.srt.layers.moe import topk

    call = (torch.zeros(37, 8), LOGITS, BIAS, 5, True, 4, 2)
    options = {
        "num_fused_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "apply_routed_scaling_factor_on_output": scaled,
    }
    # SGLang's torch code chooses 5 experts and overwrites the last: the routed four are those of a call for four.
    routed = topk.biased_grouped_topk(
        *call[:3], 4, *call[4:], routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=scaled
    )
    applied("routing")
    weights, ids = topk.biased_grouped_topk(*call, **options)
    torch.testing.assert_close(by_expert(weights[:, :4], ids[:, :4]), by_expert(*routed))
    assert (ids[:, 4] == 16).all()
    torch.testing.assert_close(weights[:, 4], torch.full((37,), 1.0 if scaled else 1 / 2.5))


def test_bfloat16_logits_are_read_as_they_are(applied):
    from sglang.srt.layers.moe import topk

    applied("routing")
    logits = LOGITS.bfloat16()
    rest = (BIAS, 4, True, 4, 2)
    for one, two in zip(
        topk.biased_grouped_topk(torch.zeros(37, 8), logits, *rest),
        topk.biased_grouped_topk(torch.zeros(37, 8), logits.float(), *rest),
        strict=True,
    ):
        assert torch.equal(one, two)
    ran("top2_sum_gate")


@pytest.mark.parametrize(
    "changes", [{"renormalize": False}, {}, {"apply_routed_scaling_factor_on_output": True, "scoring_func": "sigmoid"}]
)
def test_the_layer_of_v2_agrees_with_sglang(applied, changes):
    options = {"correction_bias": None, "scoring_func": "softmax", **changes}
    theirs = route(layer(**options))
    applied("routing-grouped")
    torch.testing.assert_close(route(layer(**options)), theirs)
    ran("topk_sum_and_topk_group_idx", "topk_gate")


def exact_scores(logits, scoring="sqrtsoftplus"):
    return (
        torch.nn.functional.softplus(logits.double()).sqrt() if scoring == "sqrtsoftplus" else logits.double().sigmoid()
    )


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_router_of_v4_computes_its_formula(applied, scoring, scaled):
    from sglang.srt.layers.moe import topk

    applied("routing-scores")
    weights, ids = topk.biased_topk_jit_kernel_impl(
        hidden_states=torch.zeros(37, 8),
        gating_output=LOGITS,
        correction_bias=BIAS.bfloat16(),
        topk=4,
        renormalize=True,
        scoring_func=scoring,
        routed_scaling_factor=1.5,
        num_token_non_padded=torch.tensor(30),
        apply_routed_scaling_factor_on_output=scaled,
    )
    scores = exact_scores(LOGITS, scoring)
    best = (scores + BIAS.bfloat16()).topk(4).indices
    expected = torch.zeros(37, 17, dtype=torch.float64)
    chosen = scores.gather(1, best)
    expected.scatter_(1, best, chosen / chosen.sum(-1, keepdim=True) * (1.5 if scaled else 1.0))
    torch.testing.assert_close(by_expert(weights[:30], ids[:30]).double(), expected[:30], rtol=1e-5, atol=1e-6)
    assert (ids[30:] == -1).all()
    assert (weights[30:] == 0).all()
    ran("moe_topk_gate")


def test_packed_ids_stay_with_sglang(applied, monkeypatch):
    from sglang.srt.layers.moe import topk

    calls = []
    monkeypatch.setattr(topk, "_use_aiter", False)
    replacement = SITES_BY_NAME["routing-scores"].patches[0].make(lambda *args, **kwargs: calls.append(kwargs))
    replacement(torch.zeros(37, 8), LOGITS, BIAS, 4, True, "sqrtsoftplus", packed_out=torch.zeros(37, 4))
    assert engine_reasons("moe_topk_gate") == ["packed ids"]
    assert calls[0]["packed_out"].shape == (37, 4)


SITES_BY_NAME = {s.name: s for s in reversed(SITES)}


def test_the_hash_layer_of_v4_agrees_with_sglang(applied, monkeypatch):
    from sglang.srt.layers.moe.hash_topk import HashTopK

    hashed = HashTopK(topk=4, num_experts=16, vocab_size=64, layer_id=0)
    hashed.tid2eid.data = torch.stack([torch.randperm(16)[:4] for _ in range(64)]).int()
    tokens = torch.randint(64, (37,))
    monkeypatch.setenv("SGLANG_OPT_USE_FUSED_HASH_TOPK", "0")
    theirs = by_expert(*hashed(torch.zeros(37, 8), LOGITS, tokens)[:2])
    monkeypatch.setenv("SGLANG_OPT_USE_FUSED_HASH_TOPK", "1")
    applied("routing-hash")
    torch.testing.assert_close(by_expert(*hashed(torch.zeros(37, 8), LOGITS, tokens)[:2]), theirs)
    ran("moe_topk_gate")


# -- routed experts ------------------------------------------------------------------------------------------------


@pytest.fixture
def moe():
    tokens, hidden, width, experts, topk = 9, 256, 256, 4, 2
    config = SimpleNamespace(
        activation="silu", gemm1_alpha=None, gemm1_clamp_limit=None, apply_router_weight_on_input=False
    )
    order = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        x=normal(tokens, hidden).bfloat16(),
        layer=SimpleNamespace(
            num_experts=experts,
            w13_weight=normal(experts, 2 * width, hidden, seed=1, gain=hidden**-0.5).bfloat16(),
            w2_weight=normal(experts, hidden, width, seed=2, gain=width**-0.5).bfloat16(),
        ),
        ids=torch.stack([torch.randperm(experts, generator=order)[:topk] for _ in range(tokens)]).int(),
        weights=torch.rand(tokens, topk, generator=order),
        config=config,
    )


def run_experts(moe):
    from sglang.srt.layers.moe import fused_moe_native

    return fused_moe_native.moe_forward_native(moe.layer, moe.x, (moe.weights, moe.ids, None), moe.config)


def test_cpu_experts_agree_with_sglang(applied, moe):
    theirs = run_experts(moe)
    applied("routed-experts")
    torch.testing.assert_close(run_experts(moe), theirs, rtol=2e-2, atol=2e-2)
    ran("get_fused_mapping", "expand_to_fused", "swiglu_forward", "reduce_fused")


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"),
    [
        ("config", "activation", "gelu", "activation gelu"),
        ("layer", "num_experts", 8, "expert parallelism on CPU"),
        ("layer", "w13_weight_bias", torch.zeros(4, 512), "experts with a bias"),
    ],
)
def test_other_cpu_experts_stay_with_sglang(moe, where, name, value, reason):
    setattr(getattr(moe, where), name, value)
    calls = []
    replacement = SITES_BY_NAME["routed-experts"].patches[0].make(lambda *args: calls.append(args))
    replacement(moe.layer, moe.x, (moe.weights, moe.ids, None), moe.config)
    assert len(calls) == 1
    assert engine_reasons("reduce_fused") == [reason]


@pytest.mark.parametrize("factor", [None, 1.0, 2.5])
def test_the_reduction_of_the_triton_experts(applied, factor):
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    rows, out = normal(5, 3, 64).bfloat16(), torch.full((5, 64), 7.0).bfloat16()
    applied("routed-experts-triton")
    assert fused_moe.moe_combine_topk(rows, out, factor) is out
    exact = rows.float().sum(1) * (factor or 1.0)
    torch.testing.assert_close(out.float(), exact, rtol=2**-8, atol=2**-10)
    ran("reduce_fused")
    assert fused_moe.moe_combine_topk(rows, out, factor, no_combine=True) is not None
    assert engine_reasons("reduce_fused") == ["the rows are not added here"]


# -- DeepGEMM ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("expert_start", [0, 2])
def test_scatter_keeps_its_contract(applied, monkeypatch, quantised, expert_start):
    from sglang.kernels.ops.moe import ep_moe_kernels

    asked, run = [], dispatch.run

    def noting(op, plan, args, *rest):
        asked.extend(args[-1:] if op.name.startswith("expand_to_fused") else ())
        return run(op, plan, args, *rest)

    monkeypatch.setattr(dispatch, "run", noting)

    applied("routed-experts-scatter")
    tokens, hidden, experts, topk, block = 7, 256, 4, 2, 128
    ids = torch.stack([torch.randperm(experts + expert_start)[:topk] for _ in range(tokens)]).int()
    ids[1, 1] = -1
    local = ids - expert_start
    count = torch.bincount(local[(local >= 0) & (ids >= 0)].flatten(), minlength=experts)
    padded = (count + block - 1) // block * block
    rows = int(padded.sum()) + block
    x = normal(tokens, hidden).bfloat16()
    scales = torch.rand(tokens, 2)
    source = x.to(torch.float8_e4m3fn) if quantised else x
    out = torch.zeros(rows, hidden, dtype=source.dtype)
    out_scales = torch.zeros(rows, 2)
    owners = torch.full((rows,), 9, dtype=torch.int32)
    places = torch.full((tokens, topk), 9, dtype=torch.int32)
    ep_moe_kernels.ep_scatter(
        source,
        scales if quantised else None,
        ids,
        padded.int(),
        count.int(),
        torch.empty(experts, dtype=torch.int32),
        out,
        out_scales,
        owners,
        places,
        expert_alignment=block,
        expert_start=expert_start,
    )
    start = padded.cumsum(0) - padded
    for e in range(experts):
        assert (owners[start[e] : start[e] + count[e]] == e).all()
        assert (owners[start[e] + count[e] : start[e] + padded[e]] == -1).all()
    for t in range(tokens):
        for k in range(topk):
            e = int(local[t, k])
            if ids[t, k] < 0 or e < 0:
                assert places[t, k] == -1
                continue
            assert owners[places[t, k]] == e
            assert torch.equal(out[places[t, k]].float(), source[t].float())
            if quantised:
                assert torch.equal(out_scales[places[t, k]], scales[t])
    # SGLang does not write padding rows either; the reference does in any case, so look at what was asked for.
    assert asked == [False]


@pytest.mark.parametrize("tokens", [5, 1024])  # the scaling factor is a scale of the rows, or part of the weights
def test_the_reduction_behind_deepgemm(tokens, applied):
    from sglang.kernels.ops.moe import ep_moe_kernels

    applied("routed-experts-reduce")
    down, weights = normal(3, 8, 64).bfloat16(), torch.rand(tokens, 2)  # a masked buffer: [experts, rows, hidden]
    places = torch.randint(24, (tokens * 2,)).int()
    places[3] = -1
    out = torch.empty(tokens, 64, dtype=torch.bfloat16)
    ep_moe_kernels.post_reorder_deepgemm(down, out, places, torch.zeros(tokens, 2), weights, 2, tokens, 64, 2.5)
    rows = down.view(24, 64).float()[places.long().clamp(min=0)] * (places >= 0)[:, None]
    expected = (rows.view(tokens, 2, 64) * weights[..., None]).sum(1) * 2.5
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
    ran("reduce_fused")


# -- casts ---------------------------------------------------------------------------------------------------------


def cast_back(data, scales):
    return find("per_token_cast_back").call("reference", (data, scales), "fp32", 128)  # not counted


LAYOUTS = [
    {},
    {"scale_ue8m0": True},
    {"column_major_scales": True, "scale_tma_aligned": True},
    {"column_major_scales": True, "scale_tma_aligned": True, "scale_ue8m0": True},
]


@pytest.mark.parametrize("tokens", [1, 6, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gated", [False, True])
def test_casts_in_every_layout(applied, tokens, layout, gated):
    from sglang.kernels.ops.quantization import fp8_kernel

    applied("quant")
    x = normal(tokens, 2048 if gated else 1024, gain=3.0).bfloat16()
    exact = x.float()
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
    data, scales = fp8_kernel.sglang_per_token_group_quant_fp8(x, 128, fuse_silu_and_mul=gated, **layout)
    like = fp8_kernel.create_per_token_group_quant_fp8_output_scale(
        exact.shape,
        x.device,
        128,
        *(layout.get(k, False) for k in ("column_major_scales", "scale_tma_aligned", "scale_ue8m0")),
    )
    assert (scales.dtype, scales.shape) == (like.dtype, like.shape)
    assert all(a == b for a, b, n in zip(scales.stride(), like.stride(), scales.shape, strict=True) if n > 1)
    back = cast_back(data, scales)
    amax = exact.view(tokens, 8, 128).abs().amax(-1).repeat_interleave(128, -1)
    assert ((back - exact).abs() <= amax * 2**-4).all()
    ran("swiglu_forward_and_per_token_cast" if gated else "per_token_cast")


def test_casts_into_given_results(applied):
    from sglang.kernels.ops.quantization import fp8_kernel

    applied("quant")
    x = normal(8, 256).bfloat16()
    data, scales = torch.empty(8, 256, dtype=torch.float8_e4m3fn), torch.empty(8, 2)
    given = fp8_kernel.sglang_per_token_group_quant_fp8(x, 128, output_q=data, output_s=scales)
    assert given[0] is data
    assert given[1] is scales
    torch.testing.assert_close(scales, x.float().view(8, 2, 128).abs().amax(-1) / 448)


def test_other_casts_stay_with_sglang():
    calls = []
    replacement = SITES_BY_NAME["quant"].patches[0].make(lambda *args, **kwargs: calls.append((args, kwargs)))
    x = normal(6, 256).bfloat16()
    replacement(x.view(2, 3, 256), 128, masked_m=torch.ones(2))
    replacement(x, 128, column_major_scales=True)
    replacement(x.half(), 128)
    assert len(calls) == 3
    first, second, third = sorted(engine_reasons("per_token_cast"))
    assert first == "column-major scales without padding rows"
    assert second.startswith("per_token_cast: x: expected")
    assert third == "rows of every expert in a buffer of its own"


# -- SwiGLU --------------------------------------------------------------------------------------------------------

GATE_UP = normal(10, 512, seed=5, gain=4.0).bfloat16()


def exact_swiglu(x, limit=None):
    gate, up = x.double().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + (-gate).exp()) * up


def test_the_layer_is_closer_to_the_exact_value_than_sglangs(applied):
    from sglang.srt.layers.activation import SiluAndMul

    theirs = SiluAndMul()(GATE_UP)
    applied("swiglu", last=True)
    ours = SiluAndMul()(GATE_UP)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-8)
    exact = exact_swiglu(GATE_UP)
    assert (ours - exact).abs().max() <= (theirs - exact).abs().max()
    ran("swiglu_forward")
    half = SiluAndMul()(GATE_UP.half())
    torch.testing.assert_close(half.double(), exact_swiglu(GATE_UP.half()), rtol=2e-3, atol=2e-3)
    assert engine_reasons("swiglu_forward") == ["dtype torch.float16"]


def test_the_function_behind_the_layer_on_cuda(applied):
    from sglang.kernels.ops.activation import activation

    applied("swiglu")
    out = torch.empty(10, 256).bfloat16()
    for result in (activation.silu_and_mul(GATE_UP, out), activation.silu_and_mul(GATE_UP)):
        torch.testing.assert_close(result.double(), exact_swiglu(GATE_UP), rtol=2**-8, atol=2**-10)
    ran("swiglu_forward")


def test_bounded_swiglu(applied):
    from sglang.kernels.ops.activation import silu_and_mul_clamp

    applied("swiglu-clamp")
    out = torch.empty(10, 256).bfloat16()
    silu_and_mul_clamp.silu_and_mul_clamp(GATE_UP, out, 2.0)
    torch.testing.assert_close(out.double(), exact_swiglu(GATE_UP, 2.0), rtol=2**-8, atol=2**-10)


@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize(("packed", "tokens"), [(False, 8), (True, 8), (True, 7)])
def test_quantised_swiglu(applied, limit, packed, tokens):
    """Seven rows have one of padding in SGLang's allocation."""
    from sglang.kernels.ops.activation import silu_and_mul_clamp
    from sglang.kernels.ops.quantization.fp8_kernel import create_per_token_group_quant_fp8_output_scale

    applied("swiglu-quant")
    x = GATE_UP[:tokens].contiguous()
    data = torch.empty(tokens, 256, dtype=torch.float8_e4m3fn)
    scales = create_per_token_group_quant_fp8_output_scale((tokens, 256), x.device, 128, packed, packed, packed)
    silu_and_mul_clamp.silu_and_mul_contig_post_quant(
        x, data, scales, 128, scale_ue8m0=packed, transposed=packed, swiglu_limit=limit
    )
    exact = exact_swiglu(x, limit).float()
    amax = exact.view(tokens, 2, 128).abs().amax(-1).repeat_interleave(128, -1)
    assert ((cast_back(data, scales) - exact).abs() <= amax * 2**-4).all()
    ran("swiglu_forward_and_per_token_cast")


def test_scales_without_room_for_padding_rows_stay_with_sglang():
    calls = []
    site = SITES_BY_NAME["swiglu-quant"]
    replacement = site.patches[0].make(lambda *args, **kwargs: calls.append(args))
    scales = torch.empty_strided((7, 2), (1, 8))
    replacement(GATE_UP[:7].contiguous(), torch.empty(7, 256, dtype=torch.float8_e4m3fn), scales, 128)
    assert len(calls) == 1
    assert engine_reasons("swiglu_forward_and_per_token_cast") == ["scales without padding rows"]


# -- hyper-connections ---------------------------------------------------------------------------------------------

T, H = 5, 256
RESIDUAL = normal(T, 4, H, seed=1).bfloat16()
FN = normal(24, 4 * H, seed=2, gain=0.05)
SCALE, BASE = torch.tensor([0.9, 1.1, 1.2]), normal(24, seed=3, gain=0.3)
GATES = (SCALE, BASE, 1e-6, 1e-2, 1e-6, 2.0, 4)


def exact_mixes(residual):
    """Gates of the formula in float64: pre [T, 4], post [T, 4], comb [T, 4, 4]."""
    flat = residual.double().flatten(-2)
    mixes = flat @ FN.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    z = mixes * SCALE.double().repeat_interleave(torch.tensor([4, 4, 16])) + BASE.double()
    comb = z[:, 8:].view(-1, 4, 4).softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(3):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    return z[:, :4].sigmoid() + 1e-2, 2 * z[:, 4:8].sigmoid(), comb


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()


@pytest.mark.parametrize("norm", [False, True])
def test_input_of_a_sublayer(applied, norm):
    from sglang.kernels.ops.layernorm import mhc

    applied("mhc-pre")
    weight = 1 + normal(H, seed=4, gain=0.1).bfloat16()
    options = {"norm_weight": weight, "norm_eps": 1e-5} if norm else {}
    post, comb, x = mhc.mhc_pre(RESIDUAL, FN, *GATES, **options)
    pre, exact_post, exact_comb = exact_mixes(RESIDUAL)
    expected = (pre[..., None] * RESIDUAL.double()).sum(1)
    expected = normed(expected, weight) if norm else expected
    torch.testing.assert_close(post.squeeze(-1).double(), exact_post, rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(comb.double(), exact_comb, rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(x.double(), expected, rtol=1e-2, atol=1e-2)
    ran("mhc_pre_fused")


def test_the_norm_takes_the_rms_before_the_row_is_rounded(applied):
    """As in SGLang's kernel. The rows are four halves times 1/2 + eps: 1 + 2^-8 + 2^-15, in bfloat16 1 + 2^-7."""
    from sglang.kernels.ops.layernorm import mhc

    applied("mhc-pre")
    gates = (torch.zeros(3), torch.zeros(24), 1e-6, 2**-9 + 2**-16, 1e-6, 2.0, 4)
    options = {"norm_weight": torch.full((H,), 1.5).bfloat16(), "norm_eps": 0.0}
    assert mhc.mhc_pre(torch.full((T, 4, H), 0.5).bfloat16(), FN, *gates, **options)[2].eq(1.5078125).all()


def test_streams_after_a_sublayer_agree_with_sglangs_torch_code(applied):
    from sglang.kernels.ops.layernorm import mhc

    applied("mhc-post")
    x, post, comb = normal(T, H, seed=5).bfloat16(), torch.rand(T, 4, 1), torch.rand(T, 4, 4)
    out = mhc.mhc_post(x, RESIDUAL, post, comb)
    expected = post * x[:, None].float() + torch.einsum("tij,tih->tjh", comb, RESIDUAL.float())
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
    ran("mhc_post")


def test_from_one_sublayer_to_the_next(applied):
    from sglang.kernels.ops.layernorm import mhc

    for name in ("mhc-post-pre", "mhc-post", "mhc-pre"):
        applied(name)
    x, post, comb = normal(T, H, seed=5).bfloat16(), torch.rand(T, 4, 1), torch.rand(T, 4, 4)
    updated, *rest = mhc.mhc_fused_post_pre(x, RESIDUAL, post.squeeze(-1), comb, FN, *GATES)
    streams = mhc.mhc_post(x, RESIDUAL, post, comb)
    assert torch.equal(updated, streams)
    for one, two in zip(rest, mhc.mhc_pre(streams, FN, *GATES), strict=True):
        assert torch.equal(one, two)


def test_results_in_symmetric_memory_stay_with_sglang(monkeypatch):
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    monkeypatch.setattr(pynccl_allocator, "is_symmetric_memory_enabled", lambda: True)
    calls = []
    replacement = SITES_BY_NAME["mhc-pre"].patches[0].make(lambda *args, **kwargs: calls.append(args))
    replacement(RESIDUAL, FN, *GATES)
    assert len(calls[0]) == 11
    assert engine_reasons("mhc_pre_fused") == ["the result has to lie in symmetric memory"]


def test_steps_one_by_one(applied):
    from sglang.kernels.ops.layernorm import mhc

    for name in ("mhc-sinkhorn", "mhc-combine", "mhc-broadcast"):
        applied(name)
    flat = RESIDUAL.double().flatten(-2)
    mixes = (flat @ FN.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)).float()
    pre, post, comb = mhc.hc_split_sinkhorn(mixes[:, None], SCALE, BASE, 4, 4, 1e-6)
    exact_pre, exact_post, exact_comb = exact_mixes(RESIDUAL)
    torch.testing.assert_close(pre[:, 0].double(), exact_pre - 1e-2 + 1e-6, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(post[:, 0].double(), exact_post, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(comb[:, 0].double(), exact_comb, rtol=1e-4, atol=1e-5)
    x = mhc.mhc_combine(RESIDUAL.flatten(1), pre[:, 0], 4, torch.bfloat16)
    torch.testing.assert_close(x.float(), (pre[:, 0, :, None] * RESIDUAL.float()).sum(1), rtol=2**-7, atol=2**-7)
    assert torch.equal(mhc.hc_broadcast(x, 4), x[:, None].repeat(1, 4, 1))
    ran("mhc_pre_split_mixes", "sinkhorn_normalize", "mhc_pre_apply_mix", "expand_to_mhc")


def test_the_head(applied):
    from sglang.kernels.ops.layernorm import mhc_head

    applied("mhc-head")
    x = mhc_head.fused_hc_head(RESIDUAL, FN[:4].contiguous(), SCALE[:1], BASE[:4], 1e-6, 1e-2)
    pre, _, _ = exact_mixes(RESIDUAL)
    torch.testing.assert_close(x.double(), (pre[..., None] * RESIDUAL.double()).sum(1), rtol=1e-2, atol=1e-2)
    ran("mhc_head_fused")


# -- Engram --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_engram_gate_agrees_with_sglang(applied, dtype):
    from sglang.srt.layers import engram

    x, kv = RESIDUAL.clone(), normal(T, 5 * H, seed=6).bfloat16()
    weights = [1 + normal(4, H, seed=s, gain=0.1).to(dtype) for s in (7, 8)]
    tokens = torch.tensor([3, 9, 3, 4, 9])
    call = (x, kv, *weights, 1e-6, 1e-6, tokens, 9)
    theirs = engram.engram_gate(*call)
    applied("engram-gate")
    ours = engram.engram_gate(*call)
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-8)
    assert torch.equal(ours[tokens == 9], x[tokens == 9])
    ran("engram_gate_fwd")
    weights[0] += 1  # a new load of the weights
    assert not torch.equal(engram.engram_gate(*call), ours)


def test_the_engram_hash_agrees_with_sglang_bit_for_bit(applied):
    from sglang.srt.layers import engram

    layers, ngram, vocabulary = 2, 4, 50
    tokens = torch.randint(vocabulary, (9, ngram))
    blocked = torch.zeros(9, ngram, dtype=torch.bool)
    blocked[0, 1:] = True
    token_map = torch.randperm(vocabulary)
    multipliers = torch.randint(1, 2**62, (layers, ngram)) | 1
    primes = torch.tensor([[[101, 103], [107, 109], [113, 127]], [[131, 137], [139, 149], [151, 157]]])
    sizes = primes.flatten(1)
    call = (tokens, blocked, 7, token_map, multipliers, primes, sizes.cumsum(1) - sizes)
    theirs = engram.compute_engram_hash_ids(*call)
    applied("engram-hash")
    ours = engram.compute_engram_hash_ids(*call)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    ran("engram_hash")


# -- warm-up -------------------------------------------------------------------------------------------------------


def test_calls_are_noted_and_planned_for_other_numbers_of_tokens(applied):
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    from tk_serving_patches import warm

    applied("routing")
    applied("routed-experts-triton")
    warm.start()
    route(layer())
    fused_moe.moe_combine_topk(normal(33, 3, 64).bfloat16(), torch.empty(33, 64).bfloat16(), None)
    assert {operator.name for operator, _, _ in warm._noted.values()} == {"top2_sum_gate", "reduce_fused"}
    few, many = ({launch.kernel for launch in warm._launches(count)} for count in (1, 4096))
    assert few == many
    assert {kernel.partition(".")[0] for kernel in few} == {"moe"}
    assert len(few) == 2
