"""FP4 experts in FP8 behind vLLM's Marlin experts: preparation at load, the choice of each step, numbers, reasons.

vLLM's own class on CPU tensors; its Marlin kernels and DeepGEMM, which need a GPU, have stand-ins.
"""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import fp4_layers
import pytest
import torch
from fp4_layers import EXPERTS, INTERMEDIATE, LIMIT, TOPK, close, expected

from tk_serving import dispatch
from tk_serving.config import settings
from tk_serving.modeling.fp8_experts import w4a8
from tk_serving.modeling.fp8_experts.chain import OPERATORS

pytest.importorskip("vllm")

from tk_serving_patches import Ledger, warm
from tk_serving_patches.fp4_experts import operators_refusal
from tk_serving_vllm.sites import fp4_experts

HIDDEN = 128
inputs = functools.partial(fp4_layers.inputs, HIDDEN)


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch):
    monkeypatch.setattr(settings, "experts", "upcast")


class LoadedLayer(SimpleNamespace):
    """In place of vLLM's layer; other than SimpleNamespace it can be referred to weakly."""


def layer(seed=0, exponent=None):
    """A layer as vLLM leaves it after repacking for Marlin, and its weights as float32."""
    return fp4_layers.fill(LoadedLayer(), HIDDEN, seed, exponent)


class Method:
    """In place of Mxfp4MoEMethod: what the patched method reads and makes."""

    def __init__(self, experts):
        self.experts = experts
        self.moe_kernel = None

    def build(self, layer):
        self.moe_kernel = SimpleNamespace(fused_experts=self.experts)


def marlin_experts(**differences):
    """An instance of vLLM's class, made without its GPU checks."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

    made = MarlinExperts.__new__(MarlinExperts)
    made.input_dtype = None
    made.moe_config = SimpleNamespace(
        activation=MoEActivation.SILU,
        has_bias=False,
        experts_per_token=TOPK,
        num_experts=EXPERTS,
        in_dtype=torch.bfloat16,
        is_lora_enabled=False,
        moe_parallel_config=SimpleNamespace(enable_eplb=False),
    )
    made.quant_config = SimpleNamespace(use_mxfp4_w4a16=True)
    made.activation_config = SimpleNamespace(clamp_limit=LIMIT, alpha=1.0, beta=0.0)
    made._uses_post_gemm2_hook = lambda tokens: False
    for name, value in differences.items():
        owner, _, attribute = name.rpartition("__")
        setattr(getattr(made, owner) if owner else made, attribute, value)
    return made


def grouped_product(x, weight, out, pos_to_expert):
    (data, sf), (values, scales) = x, weight
    rows = data.float() * sf.repeat_interleave(128, dim=1)
    for expert in range(len(values)):
        at = pos_to_expert == expert
        scale = scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        out[at] = (rows[at] @ (values[expert].float() * scale).T).to(out.dtype)


@pytest.fixture
def deep_gemm(monkeypatch):
    """A stand-in for DeepGEMM; the alignments that were in force."""
    from vllm.utils import deep_gemm

    used = []

    @contextlib.contextmanager
    def scope(value):
        used.append(value)
        yield

    monkeypatch.setattr(deep_gemm, "m_grouped_fp8_gemm_nt_contiguous", grouped_product)
    monkeypatch.setattr(deep_gemm, "mk_alignment_scope", scope)
    return used


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    fp4_experts._refusal.cache_clear()
    monkeypatch.setattr(settings, "experts", "upcast")
    monkeypatch.setattr(settings, "experts_min_tokens", 3)


def loaded(found=None, **differences):
    """Experts whose layer has been loaded through the patched method."""
    experts = marlin_experts(**differences)
    build = fp4_experts._setup_kernel(Method.build)
    build(Method(experts), found or layer()[0])
    return experts


def call(experts, x, ids, weights, expert_map=None, total=EXPERTS, on_input=False, layer=None, workspace=None):
    """The patched ``apply``; stock fills the output with 7."""
    out = torch.zeros_like(x)
    apply = fp4_experts._apply(lambda self, output, *rest: output.fill_(7.0))
    w1, w2 = (layer.w13_weight, layer.w2_weight) if layer else (None, None)
    rest = None, None, None, workspace, None, on_input
    apply(experts, out, x, w1, w2, weights, ids, None, total, expert_map, *rest)
    return out


def reasons(operators=OPERATORS):
    rows = [row for row in dispatch.counters() if row["implementation"] == "engine"]
    assert {row["operator"] for row in rows} in (set(), set(operators))
    return {row["reason"] for row in rows}


def test_many_tokens_run_in_fp8_and_few_stay(deep_gemm):
    found, values = layer()
    experts = loaded(found)
    x, ids, weights = inputs()
    assert close(call(experts, x, ids, weights), expected(values, x, ids, weights))
    assert reasons() == set()
    assert deep_gemm == [64] * 3  # the first step runs smaller ones as well, of 3 and 6 tokens, to build their kernels
    assert close(call(experts, x, ids, weights), expected(values, x, ids, weights))
    assert deep_gemm == [64] * 4
    assert call(experts, x[:2], ids[:2], weights[:2]).eq(7).all()
    assert reasons() == {"fewer than 3 tokens"}


def test_experts_of_other_ranks(deep_gemm):
    """Global expert 2 e + 1 is the local expert e of this rank; the others are elsewhere."""
    found, values = layer()
    x, ids, weights = inputs(total=2 * EXPERTS)
    expert_map = torch.tensor([-1, 0, -1, 1, -1, 2, -1, 3], dtype=torch.int32)
    got = call(loaded(found), x, ids, weights, expert_map, total=2 * EXPERTS)
    assert close(got, expected(values, x, expert_map[ids.long()], weights))


def test_layers_of_a_model_share_a_workspace(deep_gemm):
    (first, values), (second, other) = layer(0), layer(1)
    experts = [loaded(first), loaded(second)]
    states = [getattr(e, fp4_experts._STATE) for e in experts]
    assert states[0].layers is states[1].layers
    x, ids, weights = inputs()
    for _ in range(2):
        assert close(call(experts[0], x, ids, weights), expected(values, x, ids, weights))
        assert close(call(experts[1], x, ids, weights), expected(other, x, ids, weights))
    assert states[0].layers.extra_bytes == 3 * EXPERTS * HIDDEN * INTERMEDIATE


def test_resident_weights(deep_gemm, monkeypatch):
    monkeypatch.setattr(settings, "experts", "resident")
    (first, values), (second, _) = layer(0), layer(1)
    experts = [loaded(first), loaded(second)]
    x, ids, weights = inputs()
    assert close(call(experts[0], x, ids, weights), expected(values, x, ids, weights))
    assert getattr(experts[0], fp4_experts._STATE).layers.extra_bytes == 6 * EXPERTS * HIDDEN * INTERMEDIATE


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        ({"moe_config__has_bias": True}, "experts with a bias"),
        ({"moe_config__is_lora_enabled": True}, "LoRA"),
        ({"input_dtype": torch.float8_e4m3fn}, "not FP4 weights with 16-bit activations"),
        ({"quant_config__use_mxfp4_w4a16": False}, "not FP4 weights with 16-bit activations"),
        ({"activation_config__alpha": 1.702}, "activation silu with alpha 1.702 and beta 0.0"),
        (
            {"moe_config__moe_parallel_config": SimpleNamespace(enable_eplb=True)},
            "vLLM moves experts between ranks (EPLB)",
        ),
    ],
)
def test_layers_that_stay_with_marlin_say_why(differences, reason):
    experts = loaded(**differences)
    assert call(experts, *inputs()).eq(7).all()
    assert reasons() == {reason}
    assert isinstance(getattr(experts, fp4_experts._STATE), str)  # no workspace


def test_scales_that_span_too_much_stay_with_marlin(deep_gemm):
    assert call(loaded(layer(exponent=100)[0]), *inputs()).eq(7).all()
    assert reasons() == {"block scales span more than FP8 holds exactly"}


def test_stock_takes_no_memory(monkeypatch):
    monkeypatch.setattr(settings, "experts", "stock")
    experts = loaded()
    assert call(experts, *inputs()).eq(7).all()
    assert reasons() == {"TK_SERVING_EXPERTS=stock"}
    assert isinstance(getattr(experts, fp4_experts._STATE), str)  # no workspace


def test_calls_that_stay_with_marlin_say_why(deep_gemm):
    x, ids, weights = inputs()
    experts = loaded()
    assert call(experts, x, ids, weights, on_input=True).eq(7).all()
    experts._uses_post_gemm2_hook = lambda tokens: True
    assert call(experts, x, ids, weights).eq(7).all()
    assert call(marlin_experts(), x, ids, weights).eq(7).all()
    assert reasons() == {
        "weights on the input",
        "a hook behind the second product",
        "loaded before the site was applied",
    }


# -- w4a8: FP4 weights as they are ---------------------------------------------------------------------------------


@pytest.fixture
def as_it_is(monkeypatch):
    monkeypatch.setattr(settings, "experts", "w4a8")
    operators_refusal.cache_clear()


def marlin_bytes(found):
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    return {name: getattr(found, name).untyped_storage().nbytes() for name in names}


def test_w4a8_runs_every_step_on_weights_in_place_of_marlins(as_it_is):
    found, values = layer()
    before = marlin_bytes(found)
    experts = loaded(found)
    after = marlin_bytes(found)
    # As many bytes as Marlin's, and a scale for each row.
    assert sum(after.values()) == sum(before.values()) + 4 * EXPERTS * (2 * INTERMEDIATE + HIDDEN)
    # What vLLM reads sizes off.
    assert found.w13_weight.shape[:2] == (EXPERTS, HIDDEN // 16)
    assert found.w2_weight.shape[:2] == (EXPERTS, INTERMEDIATE // 16)
    for tokens in (1, 2, 9, 70):
        x, ids, weights = inputs(tokens)
        assert close(call(experts, x, ids, weights, layer=found), expected(values, x, ids, weights))
    assert reasons() == set()


def test_w4a8_with_ids_of_other_ranks_and_of_another_dtype(as_it_is):
    found, values = layer()
    x, ids, weights = inputs(total=2 * EXPERTS)
    expert_map = torch.tensor([-1, 0, -1, 1, -1, 2, -1, 3], dtype=torch.int32)
    got = call(loaded(found), x, ids.long(), weights, expert_map, total=2 * EXPERTS, layer=found)
    assert close(got, expected(values, x, expert_map[ids.long()], weights))


def test_w4a8_uses_vllms_workspace(as_it_is):
    found, values = layer()
    experts = loaded(found)
    x, ids, weights = inputs(40)
    shapes = fp4_experts._workspace_shapes(lambda *_: pytest.fail("stock"))
    sizes = (INTERMEDIATE, HIDDEN, TOPK, EXPERTS, EXPERTS, None, None)
    unused, used, out = shapes(experts, 40, *sizes)
    assert (unused, out) == ((1,), (40, HIDDEN))
    workspace = torch.full(used, torch.nan, dtype=torch.bfloat16)
    got = call(experts, x, ids, weights, layer=found, workspace=workspace)
    assert close(got, expected(values, x, ids, weights))
    assert not workspace.isnan().all()
    larger = [shapes(experts, tokens, *sizes)[1][0] for tokens in range(1, 300)]
    assert larger == sorted(larger), "vLLM reserves what the largest step needs"
    assert fp4_experts._workspace_shapes(lambda *_: "stock")(marlin_experts(), 40, *sizes) == "stock"


def test_w4a8_finds_reloaded_weights_in_the_layers_parameters(as_it_is):
    """vLLM prepares new weights as it did the first ones and copies them to where those lie."""
    (found, _), (other, values) = layer(0), layer(1)
    experts = loaded(found)
    loaded(other)
    for name in marlin_bytes(found):
        getattr(found, name).data.copy_(getattr(other, name))
    x, ids, weights = inputs()
    assert close(call(experts, x, ids, weights, layer=found), expected(values, x, ids, weights))


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        ({"moe_config__has_bias": True}, "experts with a bias"),
        ({"moe_config__in_dtype": torch.float16}, "grouped_gemm_fp8_fp4: out: expected dtype bfloat16"),
        ({"activation_config__alpha": 1.702}, "activation silu with alpha 1.702 and beta 0.0"),
        (
            {"moe_config__moe_parallel_config": SimpleNamespace(enable_eplb=True)},
            "vLLM moves experts between ranks (EPLB)",
        ),
    ],
)
def test_w4a8_layers_that_stay_with_marlin_keep_its_weights(as_it_is, differences, reason):
    found, _ = layer()
    kept = found.w13_weight.data.clone()
    experts = loaded(found, **differences)
    assert torch.equal(found.w13_weight, kept)
    assert call(experts, *inputs(), layer=found).eq(7).all()
    (counted,) = reasons(w4a8.OPERATORS)
    assert counted.startswith(reason)


def test_w4a8_of_scales_that_span_too_much_stays_with_marlin(as_it_is):
    found, _ = layer(exponent=119 - 27)
    experts = loaded(found)
    assert call(experts, *inputs(), layer=found).eq(7).all()
    assert reasons(w4a8.OPERATORS) == {"scales of a row span more than 26 powers of two"}
    found, values = layer(exponent=118 - 23)  # more than upcast holds
    x, ids, weights = inputs()
    assert close(call(loaded(found), x, ids, weights, layer=found), expected(values, x, ids, weights))


def test_w4a8_with_an_operator_switched_off_or_batch_invariance_stays_with_marlin(as_it_is, monkeypatch):
    found, _ = layer()
    found.apply_router_weight_on_input = True
    assert loaded(found)._tk_serving_fp8 == "weights on the input"
    monkeypatch.setattr(settings, "disable", frozenset({"grouped_gemm_fp8_fp4"}))
    operators_refusal.cache_clear()
    assert "switched off" in loaded(layer()[0])._tk_serving_fp8
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert loaded(layer()[0])._tk_serving_fp8 == "results must not depend on the number of tokens"


def test_w4a8_keeps_marlins_weights_where_calls_are_compared(as_it_is, monkeypatch):
    monkeypatch.setattr(settings, "compare", True)
    found, values = layer()
    kept = found.w13_weight.data.clone()
    experts = loaded(found)
    assert torch.equal(found.w13_weight, kept)
    x, ids, weights = inputs()
    assert close(call(experts, x, ids, weights, layer=found), expected(values, x, ids, weights))


def test_w4a8_refuses_a_call_that_only_marlin_could_run(as_it_is):
    found, _ = layer()
    with pytest.raises(RuntimeError, match="weights on the input"):
        call(loaded(found), *inputs(), layer=found, on_input=True)


def test_w4a8_plans_the_kernels_of_every_number_of_tokens_before_the_first_request(as_it_is):
    warm.start()
    found, _ = layer()
    loaded(found)
    many = {launch.key for count in (1, 64, 4096) for launch in warm._launches(count)}
    assert len({key for key in many if "grouped_gemm_fp8_fp4" in str(key)}) >= 2
    assert any("expand_to_fused_and_cast" in str(key) for key in many)
    warm.start()
    assert not warm._made


def test_a_switched_off_operator_leaves_the_call_to_marlin(deep_gemm, monkeypatch):
    experts = loaded()
    monkeypatch.setattr(settings, "disable", frozenset({"reduce_fused"}))
    assert call(experts, *inputs()).eq(7).all()
    assert len(reasons()) == 1


def test_site_patches_and_reverts_all_functions():
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    def functions():
        return MarlinExperts.apply, MarlinExperts.workspace_shapes, Mxfp4MoEMethod._setup_kernel

    before = functions()
    ledger = Ledger()
    # The sources are those of the CUDA release; the CPU build's differ.
    site = dataclasses.replace(fp4_experts.SITES[0], unsuitable=lambda: None, sources={})
    assert {row.status for row in ledger.apply(site)} == {"patched"}
    assert all(now is not then for now, then in zip(functions(), before, strict=True))
    ledger.revert()
    assert functions() == before


def test_site_is_for_hopper_only():
    assert fp4_experts.SITES[0].unsuitable() == "for cuda; this platform is cpu"
