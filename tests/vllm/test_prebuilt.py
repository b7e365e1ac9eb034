"""`tk-serving build` makes every kernel that the adapters launch for a model: a server with its cache compiles nothing.

The adapters are called with tensors of the real models' shapes that hold no memory; their plans are collected.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

from tk_serving.compile import ahead
from tk_serving.modeling.fp8_experts.chain import Shape
from tk_serving.plan import Out
from tk_serving_patches import calls
from tk_serving_patches.fp4_experts import operators_refusal
from tk_serving_vllm.sites import (
    _calls,
    _handed_over,
    _linear,
    fp4_experts,
    hyper_connections,
    linear_input,
    routed_experts_deepgemm,
    routed_experts_triton,
    routing,
    shared_experts,
    swiglu,
)

META = torch.device("meta")
TOKENS = (1, 7, 64, 300, 512, 513, 2100, 8192)
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
GATES = (1e-6, 1e-6, 1e-6, 2.0, 20)


def of(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device=META)


class Planned:
    """In place of a planned call: what would be launched is noted, and its results have shapes alone."""

    def __init__(self, launches, function, *args, **kwargs):
        self.operator = function.operator
        self.bound = self.operator.bind(*args, **kwargs)
        self.plan = self.operator.plan(*self.bound)
        assert self.plan.launches, self.operator.name
        launches.update(self.plan.launches)

    def __call__(self):
        empty = [out.empty(META) if isinstance(out, Out) else None for out in self.plan.outputs]
        flat = self.operator._returned(self.plan, empty)
        return self.operator.finish(flat, *self.bound) if self.operator.finish else self.operator._structured(flat)

    def into(self, outputs):
        self.plan.into(outputs)


@pytest.fixture
def launches(monkeypatch):
    found = set()

    def ask(function, device, *args, **kwargs):
        return Planned(found, function, *args, **kwargs)

    monkeypatch.setattr(_calls, "ask", ask)
    monkeypatch.setattr(calls, "ask", ask)
    _handed_over.forget()
    yield found
    _handed_over.forget()


def use(monkeypatch, cast):
    monkeypatch.setattr(_linear, "cast_of", lambda quant: cast)
    monkeypatch.setattr(_linear, "cast_of_layer", lambda layer: cast)


def streams(tokens, hidden, cast):
    """Everything that DeepSeek-V4 calls between two sublayers, before and after it knows how its layers quantise."""
    x, residual = of(tokens, hidden), of(tokens, 4, hidden)
    mixes = of(tokens, 4, 1, dtype=F32), of(tokens, 4, 4, dtype=F32)
    mixer = of(24, 4 * hidden, dtype=F32), of(3, dtype=F32), of(24, dtype=F32)
    norm = {"norm_weight": of(hidden), "norm_eps": 1e-6}
    for wanted in ({}, {META: cast}):
        _handed_over.forget()
        _handed_over._wanted.update(wanted)
        hyper_connections._pre_broadcast(None)(x, *mixer, *GATES, **norm)
        hyper_connections._pre(None)(residual, *mixer, *GATES, **norm)
        hyper_connections._post_pre(None)(x, residual, *mixes, *mixer, *GATES, **norm)
    hyper_connections._post(None)(x, residual, *mixes)
    head = of(4, 4 * hidden, dtype=F32), of(1, dtype=F32), of(4, dtype=F32)
    hyper_connections._head(None)(residual, *head, 1e-6, 1e-6)


def routes(monkeypatch, make, router, logits, **more):
    for mask in (None, of(len(logits), dtype=torch.bool)):
        monkeypatch.setattr(routing, "_is_token", lambda tokens, mask=mask: mask)
        make(None)(router, None, logits, None, **more)


@functools.cache
def built(model):
    return {job.launch for job in ahead.jobs([model], ["sm_90a"])}


def missing(launches, model):
    return sorted(set(map(str, launches)) - built(model))


@pytest.mark.parametrize("tokens", TOKENS)
def test_deepseek_v4(launches, monkeypatch, tokens):
    hidden, width, experts, topk = 4096, 2048, 256, 6
    cast = _handed_over.Cast(128, column_major=True, round_sf=True)
    use(monkeypatch, cast)
    streams(tokens, hidden, cast)
    _handed_over.forget()
    for channels in (hidden, 1024, 2 * hidden):
        linear_input._forward_cuda(None)(None, of(tokens, channels))
    router = SimpleNamespace(
        scoring_func="sqrtsoftplus",
        renormalize=True,
        routed_scaling_factor=1.5,
        top_k=topk,
        e_score_correction_bias=of(experts, dtype=F32),
        _hash_indices_table=None,
    )
    logits = of(tokens, experts, dtype=F32)
    routes(monkeypatch, routing._biased, router, logits)
    router._hash_indices_table, router.e_score_correction_bias = of(129280, topk, dtype=I32), None
    routes(monkeypatch, routing._biased, router, logits, input_ids=of(tokens, dtype=I32))
    routed_experts_triton._moe_sum("routed-experts-marlin")(None)(None, of(tokens, topk, hidden), of(tokens, hidden))
    layer = SimpleNamespace(
        gate_up_proj=lambda x: (of(tokens, 2 * width), None),
        down_proj=lambda x: (x, None),
        act_fn=SimpleNamespace(swiglu_limit=10.0),
    )
    shared_experts._forward(None)(layer, of(tokens, hidden))
    rows = tokens * topk
    swiglu._silu_and_mul_with_clamp(None)(of(rows, width), of(rows, 2 * width), 10.0)
    fp4_experts._refusal.cache_clear()
    fp4_experts._refusal(META, tokens, topk, experts, 2 * width, hidden, BF16, 64, 10.0, 1e-10, I32)
    assert len(launches) > 12
    assert not missing(launches, "v4-flash")


@pytest.mark.parametrize(("model", "sizes"), [("v4-flash", (256, 4096, 4096)), ("v4-pro", (384, 6144, 7168))])
def test_fp4_experts_as_they_are_at_every_number_of_tokens(launches, model, sizes):
    operators_refusal.cache_clear()
    assert operators_refusal(META, 6, Shape(*sizes), sizes[0], BF16, 10.0) is None
    assert len([launch for launch in launches if "grouped_gemm_fp8_fp4" in launch.kernel]) >= 3
    assert not missing(launches, model)


@pytest.mark.parametrize("tokens", TOKENS)
def test_deepseek_v3(launches, monkeypatch, tokens):
    hidden, width, experts, topk = 7168, 2048, 256, 8
    use(monkeypatch, _handed_over.Cast(128, column_major=True, round_sf=False))
    for channels in (hidden, 1536, 16384, 18432):
        linear_input._forward_cuda(None)(None, of(tokens, channels))
    codes = of(tokens, hidden, dtype=torch.float8_e4m3fn), of(tokens, hidden // 128, dtype=F32)
    linear_input._group_quant(None)(of(tokens, hidden), *codes, 128, 1e-10, -448.0, 448.0, False)
    router = SimpleNamespace(
        scoring_func="sigmoid",
        renormalize=True,
        routed_scaling_factor=2.5,
        top_k=topk,
        e_score_correction_bias=of(experts, dtype=F32),
        num_expert_group=8,
        topk_group=4,
        skip_padding=True,
    )
    for dtype in (F32, BF16):
        routes(monkeypatch, routing._grouped, router, of(tokens, experts, dtype=dtype))
    routed_experts_triton._moe_sum("routed-experts-triton")(None)(None, of(tokens, topk, hidden), of(tokens, hidden))
    rows = tokens * topk
    swiglu._silu_and_mul(None)(of(rows, width), of(rows, 2 * width))
    out = of(rows, width, dtype=torch.float8_e4m3fn), of(rows, 2 * width), of(rows, width // 128, dtype=F32)
    swiglu._silu_and_mul_per_block_quant(None)(*out, 128)
    routed_experts_deepgemm._refusal.cache_clear()
    sizes = (tokens, topk, experts, 128 * experts, 128, hidden, 2 * width)
    routed_experts_deepgemm._refusal(META, *sizes, BF16, "FLOAT32", None, I32)
    assert len(launches) > 10
    assert not missing(launches, "v3")


def test_a_kernel_that_is_not_built_is_found(launches):
    hyper_connections._post(None)(of(3, 192), of(3, 4, 192), of(3, 4, 1, dtype=F32), of(3, 4, 4, dtype=F32))
    assert len(missing(launches, "v4-flash")) == 1
