"""Every call site against vLLM's own code, or against its contract, on CPU tensors."""

import contextlib
import dataclasses
from types import SimpleNamespace

import declared_sites
import pytest
import torch
from torch import Tensor

from tk_serving import dispatch

pytest.importorskip("vllm")

from tk_serving_patches import Ledger, Override
from tk_serving_vllm.sites import SITES, routed_experts, routed_experts_deepgemm, routed_experts_triton, routing, swiglu


@pytest.fixture
def applied():
    """Apply a site for the length of a test."""
    ledger = Ledger()

    def apply(chosen):
        rows = ledger.apply(dataclasses.replace(chosen, unsuitable=lambda: None))
        assert {row.status for row in rows} == {"patched"}, rows

    yield apply
    ledger.revert()


def on_cpu(module):
    """The first site of a module that is for the CPU."""
    return next(chosen for chosen in module.SITES if chosen.unsuitable() is None)


def engine_reasons(operator):
    return [
        row["reason"]
        for row in dispatch.counters()
        if row["operator"] == operator and row["implementation"] == "engine"
    ]


# -- all sites -----------------------------------------------------------------------------------------------------


def test_sources_of_the_installed_vllm_are_those_that_were_tested():
    from tk_serving_vllm.activate import _vllm_version

    version, _ = _vllm_version()
    for chosen in SITES:
        if chosen.unsuitable() is None and chosen.sources:
            assert chosen.sources.get(version) == chosen.fingerprint(), chosen.name


def test_every_site_says_why_how_and_until_when_and_names_real_operators():
    declared_sites.check(SITES)


def test_the_model_tables_name_existing_sites():
    from tk_serving_patches.vllm import MODELS

    assert {name for names in MODELS.values() for name in names} <= {s.name for s in SITES}


# -- routing -------------------------------------------------------------------------------------------------------


def cpu_router(**changes):
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    settings = {
        "top_k": 4,
        "global_num_experts": 16,
        "use_grouped_topk": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "e_score_correction_bias": torch.linspace(-0.1, 0.1, 16),
    }
    return CPURouter(**{**settings, **changes})


def by_expert(weights: Tensor, ids: Tensor, experts: int = 16) -> Tensor:
    """[T, E] with the weight of every chosen expert: the order of the choices does not matter."""
    return torch.zeros(ids.shape[0], experts).scatter_(1, ids.long(), weights)


LOGITS = torch.randn(37, 16, generator=torch.Generator().manual_seed(3)) * 2


def test_cpu_routing_agrees_with_vllm(applied):
    router = cpu_router()
    theirs = router._compute_routing(LOGITS, LOGITS.bfloat16(), None)
    applied(on_cpu(routing))
    ours = router._compute_routing(LOGITS, LOGITS.bfloat16(), None)
    assert ours[0].dtype == theirs[0].dtype == torch.float32
    assert ours[1].dtype == theirs[1].dtype == torch.int32
    torch.testing.assert_close(by_expert(*ours), by_expert(*theirs))
    assert dispatch.counters()[0]["operator"] == "top2_sum_gate"
    assert engine_reasons("top2_sum_gate") == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scoring_func": "softmax", "e_score_correction_bias": None}, "softmax scores are grouped by their maximum"),
        ({"e_score_correction_bias": None}, "no correction bias: groups are ranked by their maximum"),
        ({"renormalize": False}, "weights are not normalised"),
        ({"use_grouped_topk": False, "scoring_func": "softmax"}, "no grouped top-k"),
    ],
)
def test_other_routers_stay_with_vllm_bit_for_bit(applied, changes, reason):
    router = cpu_router(**changes)
    theirs = router._compute_routing(LOGITS, LOGITS, None)
    applied(on_cpu(routing))
    ours = router._compute_routing(LOGITS, LOGITS, None)
    assert torch.equal(by_expert(*ours), by_expert(*theirs))
    assert engine_reasons("top2_sum_gate") == [reason]


def cuda_router(**changes):
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    settings = {
        "top_k": 4,
        "global_num_experts": 16,
        "num_expert_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "e_score_correction_bias": torch.linspace(-0.1, 0.1, 16),
    }
    return GroupedTopKRouter(**{**settings, **changes})


def test_cuda_routing_agrees_with_the_torch_form_of_vllm(applied):
    theirs = cpu_router()._compute_routing(LOGITS, LOGITS, None)
    applied(routing.SITES[0])
    ours = cuda_router()._compute_routing(LOGITS, LOGITS, None)
    torch.testing.assert_close(by_expert(*ours), by_expert(*theirs))
    assert ours[1].dtype == torch.int32
    assert cuda_router()._compute_routing(LOGITS, LOGITS, torch.int64)[1].dtype == torch.int64


def test_cuda_routing_drops_padding_rows_as_vllm_does(applied, monkeypatch):
    import vllm.envs
    import vllm.forward_context

    padding = torch.zeros(64, dtype=torch.bool)
    padding[30:] = True
    monkeypatch.setattr(vllm.envs, "VLLM_MOE_SKIP_PADDING", True, raising=False)
    monkeypatch.setattr(vllm.forward_context, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(vllm.forward_context, "get_forward_context", lambda: SimpleNamespace(is_padding=padding))
    applied(routing.SITES[0])
    weights, ids = cuda_router(skip_padding=True)._compute_routing(LOGITS, LOGITS, None)
    assert (ids[30:] == -1).all()
    assert (weights[30:] == 0).all()
    plain = cuda_router()._compute_routing(LOGITS, LOGITS, None)
    assert torch.equal(ids[:30], plain[1][:30])
    assert torch.equal(weights[:30], plain[0][:30])


# -- routed experts ------------------------------------------------------------------------------------------------


def dense_experts(x, w13, w2, ids, weights):
    """Routed experts in f32, token by token."""
    out = torch.zeros(x.shape[0], w2.shape[1])
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            if ids[t, k] >= 0:
                gate, up = (w13[ids[t, k]].float() @ x[t].float()).chunk(2)
                out[t] += weights[t, k] * (w2[ids[t, k]].float() @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.fixture
def moe():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, gain=1.0):
        return torch.randn(*shape, generator=generator) * gain

    tokens, hidden, width, experts, topk = 9, 256, 256, 4, 2
    return SimpleNamespace(
        x=normal(tokens, hidden).bfloat16(),
        w13=normal(experts, 2 * width, hidden, gain=hidden**-0.5).bfloat16(),
        w2=normal(experts, hidden, width, gain=width**-0.5).bfloat16(),
        ids=torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)]).int(),
        weights=torch.rand(tokens, topk, generator=generator),
    )


def cpu_experts(moe, **changes):
    """vLLM's CPU experts and the layer that owns their weights."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    settings = {"limit": None, "bias": False, "ep": False, **changes}
    experts = object.__new__(CPUUnquantizedExperts)
    experts.moe_config = SimpleNamespace(
        intermediate_size_per_partition=moe.w2.shape[2],
        activation=MoEActivation.SILU,
        has_bias=settings["bias"],
        is_act_and_mul=True,
        moe_parallel_config=SimpleNamespace(use_ep=settings["ep"]),
    )
    experts.quant_config = SimpleNamespace(gemm1_clamp_limit=settings["limit"], w1_bias=None, w2_bias=None)
    experts._use_zentorch = False
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(moe.w13.clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(moe.w2.clone(), requires_grad=False)
    layer.activation = MoEActivation.SILU
    layer.moe_config = experts.moe_config
    experts.process_weights_after_loading(layer)

    def run(**options):
        output = torch.empty_like(moe.x)
        arguments = {
            "output": output,
            "hidden_states": moe.x,
            "w1": layer.w13_weight,
            "w2": layer.w2_weight,
            "topk_weights": moe.weights,
            "topk_ids": moe.ids,
            "activation": layer.activation,
            "global_num_experts": moe.w13.shape[0],
            "expert_map": None,
            "a1q_scale": None,
            "a2_scale": None,
            "workspace13": None,
            "workspace2": None,
            "expert_tokens_meta": None,
            "apply_router_weight_on_input": False,
            **options,
        }
        experts.apply(**arguments)
        return output

    return run


def test_cpu_experts_agree_with_vllm(applied, moe):
    theirs = cpu_experts(moe)()
    applied(routed_experts.SITES[0])
    ours = cpu_experts(moe)()
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        ours.float(), dense_experts(moe.x, moe.w13, moe.w2, moe.ids, moe.weights), rtol=2e-2, atol=2e-2
    )
    assert {row["operator"] for row in dispatch.counters()} == set(routed_experts.SITES[0].operators)
    assert all(row["implementation"] == "reference" for row in dispatch.counters())


def test_cpu_experts_leave_out_absent_choices_and_given_weights(applied, moe):
    applied(routed_experts.SITES[0])
    run = cpu_experts(moe)
    moe.ids[0] = -1
    moe.ids[3, 1] = -1
    expected = dense_experts(moe.x, moe.w13, moe.w2, moe.ids, torch.ones_like(moe.weights))
    torch.testing.assert_close(run(apply_router_weight_on_input=True).float(), expected, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"bias": True}, "experts with a bias"), ({"ep": True}, "expert parallelism on CPU")],
)
def test_other_cpu_experts_stay_with_vllm_bit_for_bit(applied, moe, changes, reason):
    theirs = cpu_experts(moe)()
    applied(routed_experts.SITES[0])
    assert torch.equal(cpu_experts(moe, **changes)(), theirs)
    assert engine_reasons("reduce_fused") == [reason]


def test_cpu_experts_limit_their_activations(applied, moe):
    applied(routed_experts.SITES[0])
    moe.x = moe.x * 9
    limited = cpu_experts(moe, limit=0.5)()
    largest = moe.weights.sum(1, keepdim=True) * moe.w2.float().abs().sum(2).amax() * 0.5 * 0.5
    assert (limited.float().abs() <= largest).all()
    assert (cpu_experts(moe)().float() - limited.float()).norm() > limited.float().norm()


def test_no_tokens(applied, moe):
    applied(routed_experts.SITES[0])
    moe.x, moe.ids, moe.weights = moe.x[:0], moe.ids[:0], moe.weights[:0]
    assert cpu_experts(moe)().shape == (0, 256)


def test_triton_reduction_sums_the_weighted_rows(applied):
    rows = torch.randn(5, 3, 64).bfloat16()
    output = torch.full((5, 64), 7.0).bfloat16()
    calls = []
    moe_sum = routed_experts_triton._moe_sum("routed-experts-triton")(lambda *args: calls.append(args))
    moe_sum(None, rows, output)
    assert torch.equal(output, rows.float().sum(1).bfloat16())
    moe_sum("experts", rows, output, "ids", torch.zeros(3))
    assert calls[0][0] == "experts"
    assert engine_reasons("reduce_fused") == ["expert parallelism: rows of other ranks are not written"]


# -- DeepGEMM: the grouped product is replaced by a torch one, everything else is as on CUDA ----------------------


def quantise(x, rows, columns):
    """FP8 blocks and their scales."""
    *lead, m, n = x.shape
    blocks = x.float().reshape(*lead, m // rows, rows, n // columns, columns)
    scale = blocks.abs().amax((-3, -1)) / 448
    data = (blocks / scale[..., :, None, :, None]).reshape(x.shape).to(torch.float8_e4m3fn)
    return data, scale


def dequantise(data, scale, rows, columns):
    return data.float() * scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


@pytest.fixture
def deepgemm(monkeypatch):
    """vLLM's DeepGEMM experts with a grouped product in torch that reads the expert of every row, as DeepGEMM does."""
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe as engine

    def product(x, weight, out, row_expert):
        assert x[1].stride(0) == 1, "column-major scales"
        rows, weights = dequantise(*x, 1, 128), dequantise(*weight, 128, 128)
        for row, expert in enumerate(row_expert.tolist()):
            if expert >= 0:
                out[row] = (weights[expert] @ rows[row]).to(out.dtype)

    monkeypatch.setattr(engine, "m_grouped_fp8_gemm_nt_contiguous", product)
    monkeypatch.setattr(engine, "get_mk_alignment_for_contiguous_layout", lambda: [128, 128])
    monkeypatch.setattr(engine, "compute_aligned_M_and_alignment", lambda m, k, e, a, meta: (e * a + m * k // a * a, a))
    monkeypatch.setattr(engine.DeepGemmQuantScaleFMT, "from_oracle", lambda: engine.DeepGemmQuantScaleFMT.FLOAT32)
    monkeypatch.setattr(engine, "mk_alignment_scope", contextlib.nullcontext)
    return engine


def exact(moe, ids):
    """What the FP8 experts compute, but for the quantisation between the two products."""
    w13, w2 = (dequantise(*quantise(w, 128, 128), 128, 128) for w in (moe.w13, moe.w2))
    return dense_experts(dequantise(*quantise(moe.x, 1, 128), 1, 128), w13, w2, ids, moe.weights)


def deepgemm_experts(deepgemm, moe, original=None, **changes):
    """Run the adapter for ``DeepGemmExperts.apply``; return its output."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    w13, w13_scale = quantise(moe.w13, 128, 128)
    w2, w2_scale = quantise(moe.w2, 128, 128)
    x, x_scale = quantise(moe.x, 1, 128)
    fields = {
        "mxfp8": False,
        "block_shape": [128, 128],
        "gemm1_alpha": 1.0,
        "gemm1_beta": 0.0,
        "gemm1_clamp_limit": None,
    }
    experts = SimpleNamespace(**{**fields, "w1_scale": w13_scale, "w2_scale": w2_scale, **changes})
    output = torch.empty_like(moe.x)
    routed_experts_deepgemm._apply(original)(
        experts,
        output,
        x,
        w13,
        w2,
        moe.weights,
        moe.ids,
        MoEActivation.SILU,
        moe.w13.shape[0],
        getattr(moe, "expert_map", None),
        x_scale,
        None,
        None,
        torch.zeros(4096, 512, dtype=torch.bfloat16),
        None,
        False,
    )
    return output


def test_deepgemm_experts_agree_with_a_plain_computation(deepgemm, moe):
    ours = deepgemm_experts(deepgemm, moe)
    expected = exact(moe, moe.ids)
    assert (ours.float() - expected).norm() / expected.norm() < 0.04
    assert {row["operator"] for row in dispatch.counters()} == set(routed_experts_deepgemm.SITES[0].operators)
    assert all(row["implementation"] == "reference" for row in dispatch.counters())


def test_deepgemm_experts_skip_experts_of_other_ranks(deepgemm, moe):
    moe.expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)  # global to local
    local = moe.expert_map[moe.ids.long()]
    moe.w13, moe.w2 = moe.w13[:2], moe.w2[:2]
    ours = deepgemm_experts(deepgemm, moe)
    expected = exact(moe, local)
    assert (ours.float() - expected).norm() / expected.norm() < 0.04


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mxfp8": True, "block_shape": [1, 32]}, "quantisation blocks of [1, 32]"),
        ({"gemm1_alpha": 1.702, "gemm1_beta": 1.0}, "activation silu with alpha 1.702 and beta 1.0"),
    ],
)
def test_other_deepgemm_experts_stay_with_vllm(deepgemm, moe, changes, reason):
    calls = []
    deepgemm_experts(deepgemm, moe, lambda *args: calls.append(args), **changes)
    assert len(calls) == 1
    assert len(calls[0]) == 16
    assert engine_reasons("reduce_fused") == [reason]


# -- SwiGLU --------------------------------------------------------------------------------------------------------

GATE_UP = torch.randn(2, 5, 512, generator=torch.Generator().manual_seed(5)).bfloat16()


def exact_swiglu(x):
    gate, up = x.double().chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def test_cpu_swiglu_is_closer_to_the_exact_value_than_vllm(applied):
    from vllm.model_executor.layers.activation import SiluAndMul

    theirs = SiluAndMul.forward_native(GATE_UP)
    applied(on_cpu(swiglu))
    ours = SiluAndMul.forward_native(GATE_UP)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-9)
    exact = exact_swiglu(GATE_UP)
    assert (ours - exact).abs().max() <= (theirs - exact).abs().max()
    assert dispatch.counters()[0]["operator"] == "swiglu_forward"


def test_half_precision_stays_with_vllm(applied):
    from vllm.model_executor.layers.activation import SiluAndMul

    theirs = SiluAndMul.forward_native(GATE_UP.half())
    applied(on_cpu(swiglu))
    assert torch.equal(SiluAndMul.forward_native(GATE_UP.half()), theirs)
    assert engine_reasons("swiglu_forward") == ["dtype torch.float16"]


def test_swiglu_operator_of_vllm_is_overridden(applied):
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    x = GATE_UP.view(10, 512)
    theirs, ours = torch.empty(10, 256).bfloat16(), torch.empty(10, 256).bfloat16()
    torch.ops._C.silu_and_mul(theirs, x)
    (cuda,) = swiglu.SITES[0].patches
    assert isinstance(cuda, Override)
    cpu = dataclasses.replace(cuda, dispatch_key="CPU", schema=cuda.schema.replace("result", "out"))
    applied(dataclasses.replace(swiglu.SITES[0], patches=(cpu,)))
    torch.ops._C.silu_and_mul(ours, x)
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-9)
    assert dispatch.counters()[0]["calls"] == 1
    halves = torch.empty(10, 256).half()
    torch.ops._C.silu_and_mul(halves, x.half())
    torch.testing.assert_close(halves.double(), exact_swiglu(x), rtol=2e-3, atol=2e-3)
    assert engine_reasons("swiglu_forward") == ["dtype torch.float16"]


@pytest.mark.parametrize("transposed", [False, True])
def test_quantised_swiglu_keeps_the_contract_of_vllms_kernel(transposed):
    x = GATE_UP.view(10, 512)[:8]
    x[3] = 0
    override = swiglu._silu_and_mul_per_block_quant(None)
    out = torch.empty(8, 256, dtype=torch.float8_e4m3fn)
    scales = torch.empty(2, 8).t() if transposed else torch.empty(8, 2)
    override(out, x, scales, 128, None, transposed)
    expected = exact_swiglu(x).float().view(8, 2, 128)
    torch.testing.assert_close(scales, (expected.abs().amax(-1) / 448).clamp(min=1 / (448 * 512)), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        out.float().view(8, 2, 128) * scales[..., None], expected, rtol=2**-4, atol=scales.max().item() * 2**-9
    )


def test_other_quantised_swiglu_calls_stay_with_vllm():
    calls = []
    override = swiglu._silu_and_mul_per_block_quant(lambda *args: calls.append(args))
    x, out = GATE_UP.view(10, 512), torch.empty(10, 256, dtype=torch.float8_e4m3fn)
    override(out, x, torch.empty(10, 2), 128, torch.ones(1), False)
    override(out, x, torch.empty(2, 10).t(), 128, None, True)
    override(out.view(torch.int8), x, torch.empty(10, 2), 128, None, False)
    assert len(calls) == 3
    assert sorted(engine_reasons("swiglu_forward_and_per_token_cast")) == [
        "an upper bound for the scales",
        "column-major scales without padding rows",
        "dtype torch.int8",
    ]
