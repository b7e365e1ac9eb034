"""The call sites of DeepSeek-V4 that only CUDA has, on CPU tensors; the others run in test_deepseek_v4.py."""

from types import SimpleNamespace

import pytest
import torch

from tk_serving import dispatch

pytest.importorskip("vllm")

import v4_on_cpu

from tk_serving.quant.per_token_cast import per_token_cast
from tk_serving_patches import warm
from tk_serving_vllm.sites import (
    _handed_over,
    _linear,
    engram,
    hyper_connections,
    linear_input,
    routing,
    shared_experts,
    swiglu,
)
from tk_serving_vllm.sites._handed_over import Cast, NotTakenError, give, offer, take, wanted

CAST = Cast(128, True, True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(_linear, "_packed", lambda: False)
    _handed_over.forget()
    yield
    _handed_over.forget()


def reasons():
    return [row["reason"] for row in dispatch.counters() if row["implementation"] == "engine"]


def rows(tokens=5, width=256):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)).bfloat16()


def cast(x):
    return per_token_cast(x, "e4m3", 128, None, CAST.column_major, CAST.round_sf)


# -- handing over --------------------------------------------------------------------------------------------------


def test_rows_are_taken_by_memory_shape_and_cast():
    x = rows()
    data, sf = cast(x)
    give(x, CAST, data, sf)
    taken = take(x.view(-1, 256), CAST)
    assert taken[0] is data
    assert taken[1] is sf
    assert take(x, CAST) is not None, "a second linear layer may read the same rows"
    assert take(x, Cast(128, False, True)) is None
    assert take(x[:4], CAST) is None
    assert take(x.clone(), CAST) is None


def test_rows_that_are_gone_are_not_taken():
    x, other = rows(), rows()
    give(x, CAST, *cast(x))
    _handed_over._parcels[CPU, False].place = _handed_over._place(other)  # memory that was reused
    assert take(other, CAST) is not None
    del x
    assert take(other, CAST) is None


def test_a_linear_layer_says_what_it_wants_only_of_rows_that_were_offered():
    x = rows()
    take(x, CAST)
    assert wanted(CPU) is None
    offer(x)
    take(rows(), CAST)
    assert wanted(CPU) is None
    take(x.view(-1, 256), CAST)
    assert wanted(CPU) == CAST


def test_hollow_rows_must_be_taken_and_do_not_replace_others():
    x, hollow = rows(), rows(3)
    give(x, CAST, *cast(x))
    give(hollow, CAST, *cast(hollow), hollow=True)
    assert take(x, CAST) is not None
    with pytest.raises(NotTakenError, match=r"rows of shape \[3, 256\] were not taken"):
        give(rows(2), CAST, *cast(rows(2)), hollow=True)


# -- linear input --------------------------------------------------------------------------------------------------


def quantiser(**changes):
    settings = {
        "static": False,
        "is_group_quant": True,
        "group_size": 128,
        "column_major_scales": True,
        "tma_aligned_scales": True,
        "use_ue8m0": True,
    }
    return SimpleNamespace(**{**settings, **changes})


def quantise(original=None):
    return linear_input._forward_cuda(original)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("round_sf", [False, True])
def test_linear_input_is_quantised_as_vllm_does(column_major, round_sf):
    x = rows()
    data, sf = quantise()(quantiser(column_major_scales=column_major, use_ue8m0=round_sf), x)
    groups = x.float().view(5, 2, 128)
    exact = groups.abs().amax(-1) / 448
    expected = torch.exp2(exact.log2().ceil()) if round_sf else exact
    torch.testing.assert_close(sf, expected, rtol=1e-6, atol=0)
    assert sf.stride() == ((1, 8) if column_major else (2, 1))
    codes = (groups / expected[..., None]).to(torch.float8_e4m3fn).float().view(5, 256)
    assert (data.float() == codes).float().mean() > 0.99


def test_linear_input_takes_what_was_handed_over():
    x = rows()
    data, sf = cast(x)
    give(x, CAST, data, sf)
    dispatch.reset_counters()
    assert quantise()(quantiser(), x)[0] is data
    assert dispatch.counters() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"static": True},
        {"is_group_quant": False},
        {"group_size": 256},
        {"column_major_scales": True, "tma_aligned_scales": False},
    ],
)
def test_other_casts_stay_with_vllm(changes):
    calls = []
    quantise(lambda *args: calls.append(args))(quantiser(**changes), rows(), "scale", "bound", True)
    assert calls[0][2:] == ("scale", "bound", True)
    assert len(reasons()) == 1


def test_packed_scales_stay_with_vllm(monkeypatch):
    monkeypatch.setattr(_linear, "_packed", lambda: True)
    assert _linear.cast_of(quantiser()) is None
    assert _linear.cast_of(quantiser(use_ue8m0=False)) is not None


def group_quant(x, transposed, tma_aligned, round_sf=False, original=None):
    tokens, groups = x.shape[0], x.shape[1] // 128
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    if transposed and tma_aligned:
        sf = torch.empty_strided((tokens, groups), (1, -(-tokens // 4) * 4))
    else:
        sf = torch.empty(groups, tokens).t() if transposed else torch.empty(tokens, groups)
    linear_input._group_quant(original)(x, data, sf, 128, 1e-10, -448.0, 448.0, round_sf, transposed, tma_aligned)
    return data, sf


@pytest.mark.parametrize(("tokens", "layout"), [(5, (False, False)), (8, (True, True)), (8, (True, False))])
def test_vllms_cast_operator_fills_the_callers_tensors(tokens, layout):
    x = rows(tokens)
    data, sf = group_quant(x, *layout)
    expected = per_token_cast(x, "e4m3", 128)
    assert torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(sf, expected[1])


def test_vllms_packed_cast_operator():
    x = rows(8, 640)
    data, sf = torch.empty(8, 640, dtype=torch.float8_e4m3fn), torch.empty_strided((8, 2), (1, 8), dtype=torch.int32)
    linear_input._group_quant_packed(None)(x, data, sf, 128, 1e-10, -448.0, 448.0)
    expected = per_token_cast(x, "e4m3", 128, None, True, True, True)
    assert torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(sf, expected[1])


def test_compiled_models_keep_vllms_cast():
    def original(self, x, scale=None, scale_ub=None, use_triton=False):
        return x * 2, x.sum(-1)

    forward = linear_input._forward_cuda(original)
    compiled = torch.compile(lambda x: forward(None, x), backend="eager", fullgraph=True)
    x = torch.ones(3, 128)
    assert torch.equal(compiled(x)[0], x * 2)


def test_other_calls_of_vllms_cast_operator_stay():
    calls = []
    group_quant(rows(5), True, True, original=lambda *args: calls.append(args[3:]))
    group_quant(rows(5).half(), False, False, True, original=lambda *args: calls.append(args[3:]))
    assert calls == [
        (128, 1e-10, -448.0, 448.0, False, True, True),
        (128, 1e-10, -448.0, 448.0, True, False, False),
    ]
    assert sorted(reasons()) == ["column-major scales without padding rows", "torch.float16 of shape [5, 256]"]


# -- shared experts ------------------------------------------------------------------------------------------------


class Linear:
    """A linear layer of vLLM with an FP8 kernel; returns what it multiplies, dequantised."""

    def __init__(self, takes=True):
        def forward(quant, x):
            return quantise()(quant, x)

        if takes:
            setattr(forward, _linear.TAKES, True)
        self.quant = quantiser(_forward_method=forward)
        self.quant_method = SimpleNamespace(fp8_linear=SimpleNamespace(apply_input_quant=True, quant_fp8=self.quant))

    def __call__(self, x):
        data, sf = self.quant._forward_method(self.quant, x.view(-1, x.shape[-1]))
        return data.float() * sf.repeat_interleave(128, 1), None


@pytest.mark.parametrize("limit", [None, 1.0])
def test_shared_experts_round_where_vllm_rounds(limit):
    gate_up = rows(4, 512)
    gate, up = gate_up.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    mlp = SimpleNamespace(
        gate_up_proj=lambda x: (gate_up, None), act_fn=SimpleNamespace(swiglu_limit=limit), down_proj=Linear()
    )
    out = shared_experts._forward(None)(mlp, rows(4))
    assert [row["operator"] for row in dispatch.counters()] == ["swiglu_forward_and_per_token_cast"]
    expected = Linear()((gate.float() / (1.0 + torch.exp(-gate.float()))).bfloat16() * up)[0]
    assert torch.equal(out, expected)


def test_shared_experts_whose_product_would_not_take_the_rows_stay_with_vllm():
    calls = []
    mlp = SimpleNamespace(down_proj=Linear(takes=False))
    shared_experts._forward(lambda *args: calls.append(args))(mlp, "x")
    assert calls == [(mlp, "x")]
    assert reasons() == ["the second product does not quantise its input in groups"]


def test_routed_experts_in_bf16_have_their_limit():
    x, out = rows(4, 512), torch.empty(4, 256).bfloat16()
    swiglu._silu_and_mul_with_clamp(None)(out, x, 1.0)
    gate, up = x.float().chunk(2, -1)
    expected = torch.nn.functional.silu(gate.clamp(max=1)) * up.clamp(-1, 1)
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=2**-9)
    calls = []
    swiglu._silu_and_mul_with_clamp(lambda *args: calls.append(args[2:]))(out, x, 7.0, 1.702, 1.0)
    assert calls == [(7.0, 1.702, 1.0)]
    assert reasons() == ["alpha 1.702 and beta 1.0"]


# -- hyper-connections ---------------------------------------------------------------------------------------------

TOKENS, HIDDEN = 5, 256
GATES = (1e-6, 1e-6, 1e-6, 2.0, 4)


@pytest.fixture
def mixer():
    generator = torch.Generator().manual_seed(2)

    def normal(*shape, gain=1.0):
        return torch.randn(*shape, generator=generator) * gain

    return SimpleNamespace(
        x=normal(TOKENS, HIDDEN).bfloat16(),
        residual=normal(TOKENS, 4, HIDDEN).bfloat16(),
        fn=normal(24, 4 * HIDDEN, gain=(4 * HIDDEN) ** -0.5),
        scale=normal(3),
        base=normal(24),
        post=torch.rand(TOKENS, 4, 1, generator=generator),
        comb=torch.rand(TOKENS, 4, 4, generator=generator) / 2,
        norm=torch.rand(HIDDEN, generator=generator).bfloat16(),
    )


def norm(x, weight):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).bfloat16()


def by_vllm(m, residual):
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    post, comb, x = mhc_pre_torch(residual, m.fn, m.scale, m.base, *GATES)
    return post, comb, norm(x, m.norm)


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("quantised", [False, True])
def test_from_one_sublayer_to_the_next(mixer, quantised):
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    m = mixer
    if quantised:
        _handed_over._wanted[CPU] = CAST
    ours = hyper_connections._post_pre(None)(
        m.x, m.residual, m.post.squeeze(-1), m.comb, m.fn, m.scale, m.base, *GATES, 1, 1, m.norm, 1e-6
    )
    updated = mhc_post_torch(m.x, m.residual, m.post, m.comb)
    close(ours, (updated, *by_vllm(m, updated)))
    taken = take(ours[3].view(-1, HIDDEN), CAST)
    assert (taken is not None) == quantised
    if quantised:
        assert torch.equal(taken[0].view(torch.uint8), cast(ours[3])[0].view(torch.uint8))
    else:
        assert wanted(CPU) == CAST, "the linear layer's look-up was noted"


def test_before_the_first_sublayer(mixer):
    m = mixer
    streams, *ours = hyper_connections._pre_broadcast(None)(
        m.x, m.fn, m.scale, m.base, *GATES, norm_weight=m.norm, norm_eps=1e-6, fn_broadcast="unused"
    )
    assert torch.equal(streams, m.x.unsqueeze(1).expand(-1, 4, -1))
    close(ours, by_vllm(m, streams))
    close(
        hyper_connections._pre(None)(m.residual, m.fn, m.scale, m.base, *GATES, norm_weight=m.norm),
        by_vllm(m, m.residual),
    )


def test_the_norm_takes_the_rms_before_the_row_is_rounded(mixer):
    """As in vLLM's kernel. Each row is four halves times 1/2 + eps: 1 + 2^-8 + 2^-15, in bfloat16 1 + 2^-7."""
    row, weight = torch.full((TOKENS, HIDDEN), 0.5).bfloat16(), torch.full((HIDDEN,), 1.5).bfloat16()
    streams = row.unsqueeze(1).expand(-1, 4, -1).contiguous()
    call = (mixer.fn, torch.zeros(3), torch.zeros(24), 1e-6, 2**-9 + 2**-16, *GATES[2:])
    update = (mixer.x, streams, torch.zeros(TOKENS, 4), torch.eye(4).expand(TOKENS, 4, 4).contiguous())
    norm = {"norm_weight": weight, "norm_eps": 0.0}
    for x in (
        hyper_connections._pre(None)(streams, *call, **norm)[2],
        hyper_connections._post_pre(None)(*update, *call, **norm)[3],
        hyper_connections._pre_broadcast(None)(row, *call, **norm)[3],
    ):
        assert x.eq(1.5078125).all()


def test_after_the_last_sublayer(mixer):
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    m = mixer
    ours = hyper_connections._post(None)(m.x, m.residual, m.post, m.comb)
    assert torch.equal(ours, mhc_post_torch(m.x, m.residual, m.post, m.comb))
    head = hyper_connections._head(None)(m.residual, m.fn[:4].contiguous(), m.scale[:1], m.base[:4], 1e-6, 1e-6)
    expected = v4_on_cpu.hc_head(m.residual, m.fn[:4], m.scale[:1], m.base[:4], 1e-6, 1e-6)
    torch.testing.assert_close(head, expected, rtol=2e-2, atol=2e-2)


def test_calls_that_no_operator_covers_reach_vllm_unchanged(mixer):
    m, calls = mixer, []
    wide = m.residual.float()

    def original(*args):
        calls.append(args)

    hyper_connections._pre(original)(wide, m.fn, m.scale, m.base, *GATES, 3, m.norm, 1e-5)
    hyper_connections._post_pre(original)(m.x, wide, m.post, m.comb, m.fn, m.scale, m.base, *GATES, 1, 2, m.norm, 1e-5)
    hyper_connections._post(original)(m.x, wide, m.post, m.comb)
    hyper_connections._head(original)(wide, m.fn, m.scale, m.base, 1e-6, 1e-7)
    hyper_connections._pre_broadcast(original)(m.x.float(), m.fn, m.scale, m.base, *GATES, 1, m.norm, 1e-5, m.fn)
    assert [len(args) for args in calls] == [12, 16, 4, 6, 13]
    assert calls[0][9:] == (3, m.norm, 1e-5)
    assert calls[1][12:] == (1, 2, m.norm, 1e-5)
    assert len(reasons()) == 5


@pytest.mark.parametrize("first", [True, False])
def test_delayed_gates_of_v41(mixer, first):
    """The input takes the gates of the sublayer before (or the first stream); its own go to the next."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    m = mixer
    before = None if first else torch.rand(TOKENS, 4, generator=torch.Generator().manual_seed(8))

    def expected(streams):
        flat = streams.float().flatten(1)
        mixes = (flat @ m.fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        gate = torch.sigmoid(mixes[:, :4] * m.scale[0] + m.base[:4]) + 1e-6
        x = streams[:, 0] if first else (before.unsqueeze(-1) * streams.float()).sum(1).bfloat16()
        return *by_vllm(m, streams)[:2], norm(x, m.norm), gate

    options = {"pre_mix": before, "norm_weight": m.norm, "norm_eps": 1e-6}
    ours = hyper_connections._pre_delayed(None)(m.residual, m.fn, m.scale, m.base, *GATES, **options)
    close(ours, expected(m.residual))
    updated = mhc_post_torch(m.x, m.residual, m.post, m.comb)
    *ours, aux = hyper_connections._post_pre_delayed(None)(
        m.x, m.residual, m.post, m.comb, m.fn, m.scale, m.base, *GATES, **options
    )
    close(ours, (updated, *expected(updated)))
    assert aux.shape == (0, HIDDEN)


def test_other_delayed_calls_reach_vllm_unchanged(mixer):
    m, calls = mixer, []

    def original(*args):
        calls.append(args)

    hyper_connections._pre_delayed(original)(m.residual, m.fn, m.scale, m.base, *GATES, None, m.x, m.norm, 1e-5)
    hyper_connections._post_pre_delayed(original)(
        m.x, m.residual, m.post, m.comb, m.fn, m.scale, m.base, *GATES, m.post[..., 0], m.norm, 1e-5, True
    )
    assert calls[0][9:] == (None, m.x, m.norm, 1e-5)
    assert calls[1][13:] == (m.norm, 1e-5, True)
    assert len(reasons()) == 2


# -- Engram --------------------------------------------------------------------------------------------------------


@pytest.fixture
def layer():
    generator = torch.Generator().manual_seed(4)
    tokens, streams, dim = 6, 4, 256
    kv = torch.randn(tokens, (streams + 1) * dim, generator=generator).bfloat16()
    embedded = torch.randn(tokens, 3, 8, generator=generator)
    return SimpleNamespace(
        use_sequence_parallel=False,
        _batch=None,
        embed=lambda ids: embedded,
        wkv=lambda x: kv if torch.equal(x, embedded.flatten(-2)) else None,
        q_weight=torch.nn.Parameter(torch.rand(streams, dim, generator=generator).bfloat16()),
        k_weight=torch.nn.Parameter(torch.rand(streams, dim, generator=generator).bfloat16()),
        eps=1e-6,
        clamp_value=1e-6,
        hidden=torch.randn(tokens, streams, dim, generator=generator).bfloat16(),
        kv=kv,
    )


def gated(layer, mask):
    x = layer.hidden.float()
    rows = layer.kv.float().view(len(x), 5, -1)
    key, value = rows[:, :4], rows[:, 4:]
    dot = (x * layer.q_weight.float() * layer.k_weight.float() * key).sum(-1)
    for t in (x, key):
        dot = dot * torch.rsqrt(t.square().mean(-1) + layer.eps)
    dot = dot / x.shape[-1] ** 0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=layer.clamp_value).sqrt())
    return x + (gate if mask is None else gate * mask[:, None]).unsqueeze(-1) * value


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_engram_gate(layer, masked):
    mask = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool) if masked else None
    forward = engram._forward(None)
    out = forward(layer, layer.hidden, torch.zeros(6, 24), mask)
    torch.testing.assert_close(out.float(), gated(layer, mask), rtol=2**-7, atol=2**-7)
    forward(layer, layer.hidden, torch.zeros(6, 24), mask)
    calls = {row["operator"]: row["calls"] for row in dispatch.counters()}
    assert calls == {"fused_weight": 1, "engram_gate_fwd": 2}


def test_engram_layers_that_stay_with_vllm_are_projected_once(layer):
    calls = []

    def original(self, hidden, ids, mask):
        calls.append((self.wkv(self.embed(ids).flatten(-2)) if self._batch is None else None, hidden, mask))

    forward = engram._forward(original)
    with torch.no_grad():
        forward(layer, layer.hidden.float(), torch.zeros(6, 24))
    assert calls[0][0] is layer.kv
    layer.use_sequence_parallel = True
    forward(layer, layer.hidden, torch.zeros(6, 24))
    assert len(calls) == len(reasons()) == 2


# -- routing -------------------------------------------------------------------------------------------------------


def router(**changes):
    settings = {
        "scoring_func": "sqrtsoftplus",
        "renormalize": True,
        "top_k": 3,
        "routed_scaling_factor": 1.5,
        "e_score_correction_bias": torch.linspace(-0.3, 0.3, 16),
        "_hash_indices_table": None,
    }
    return SimpleNamespace(**{**settings, **changes})


LOGITS = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)) * 2


def by_expert(weights, ids):
    return torch.zeros(len(ids), 16).scatter_(1, ids.long(), weights)


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64])
def test_biased_routing(dtype):
    ours = routing._biased(None)(router(), None, LOGITS, dtype)
    theirs = v4_on_cpu.biased_topk(None, LOGITS, router().e_score_correction_bias, 3, True, "", 0, 1.5, True)
    torch.testing.assert_close(by_expert(*ours), by_expert(*theirs))
    assert ours[1].dtype == (dtype or torch.int32)


def test_routing_by_a_table_of_token_ids():
    table = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:3] for i in range(50)]).int()
    tokens = torch.tensor([3, 49, 0, 7, 7, 21, 30, 2, 11])
    ours = routing._biased(None)(router(_hash_indices_table=table), None, LOGITS, None, input_ids=tokens)
    theirs = v4_on_cpu.hash_topk(LOGITS, table[tokens], 3, "", 0, 16, 1.5)
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0])


def test_biased_routing_drops_padding_rows_and_inverts_the_mask_once(monkeypatch):
    import vllm.envs
    import vllm.forward_context

    context = SimpleNamespace(is_padding=torch.arange(16) >= 6)
    monkeypatch.setattr(vllm.envs, "VLLM_MOE_SKIP_PADDING", True, raising=False)
    monkeypatch.setattr(vllm.forward_context, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(vllm.forward_context, "get_forward_context", lambda: context)
    weights, ids = routing._biased(None)(router(), None, LOGITS, None)
    assert (ids[6:] == -1).all()
    assert (ids[:6] >= 0).all()
    assert (weights[6:] == 0).all()
    inverted = vars(context)[routing._KEPT][1]
    routing._biased(None)(router(), None, LOGITS, None)
    assert vars(context)[routing._KEPT][1] is inverted


def test_tokens_of_images_have_a_bias_of_their_own(monkeypatch):
    import vllm.forward_context

    context = SimpleNamespace(is_padding=None)
    monkeypatch.setattr(vllm.forward_context, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(vllm.forward_context, "get_forward_context", lambda: context)
    tokens = torch.tensor([99, 100, 104, 105, 3, 102, 0, 101, 103])
    chosen = router(bias_vl=torch.linspace(2, -2, 16), image_sentinel_lo=100)
    ours = routing._biased(None)(chosen, None, LOGITS, None, input_ids=tokens)
    image = (tokens >= 100) & (tokens < 105)
    assert image.sum() == 5
    for rows, bias in ((image, chosen.bias_vl), (~image, chosen.e_score_correction_bias)):
        theirs = v4_on_cpu.biased_topk(None, LOGITS[rows], bias, 3, True, "", 0, 1.5, True)
        torch.testing.assert_close(by_expert(*ours)[rows], by_expert(*theirs))
    mask = vars(context)[routing._IMAGES][1]
    routing._biased(None)(chosen, None, LOGITS, None, input_ids=tokens.view(9))
    assert vars(context)[routing._IMAGES][1] is mask, "once for all layers"
    routing._biased(None)(chosen, None, LOGITS[:4], None, input_ids=tokens[:4])
    assert len(vars(context)[routing._IMAGES][1]) == 4
    text = routing._biased(None)(router(bias_vl=chosen.bias_vl, image_sentinel_lo=0), None, LOGITS, None)
    assert torch.equal(text[1], routing._biased(None)(router(), None, LOGITS, None)[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scoring_func": "softmax"}, "softmax scores"),
        ({"renormalize": False}, "weights are not normalised"),
        (
            {"bias_vl": torch.zeros(16), "image_sentinel_lo": 7, "_hash_indices_table": torch.zeros(9, 3).int()},
            "image tokens have a bias, others a table",
        ),
        ({"num_fused_shared_experts": 1}, "shared experts among the routed ones"),
    ],
)
def test_other_biased_routers_stay_with_vllm(changes, reason):
    calls = []
    chosen = router(**changes)
    routing._biased(lambda *args, **kwargs: calls.append((args, kwargs)))(chosen, "x", LOGITS, None, input_ids="ids")
    assert calls == [((chosen, "x", LOGITS, None), {"input_ids": "ids"})]
    assert reasons() == [reason]


def test_which_tokens_are_images_must_be_known():
    chosen = router(bias_vl=torch.zeros(16), image_sentinel_lo=7)
    assert routing._biased(lambda *args, **kwargs: "vLLM's")(chosen, "x", LOGITS, None) == "vLLM's"
    assert reasons() == ["image tokens have a bias, and which they are is not said"]


# -- warm-up -------------------------------------------------------------------------------------------------------


def test_calls_are_planned_again_for_other_numbers_of_tokens():
    from tk_serving.moe.moe_topk_gate import moe_topk_gate
    from tk_serving.moe.reduce_fused import reduce_fused

    warm.start()
    hidden = torch.empty(33 * 4, 256).bfloat16()
    place = torch.empty(33, 4, dtype=torch.int32)
    call = (hidden, None, place)
    for _ in range(2):
        warm.note(moe_topk_gate, 33, (torch.empty(33, 64), 6, False, 0, 1.5, 0), {"bias": torch.empty(64)})
        warm.note(reduce_fused, 33, call, {"out": torch.empty(33, 256).bfloat16()})
    assert len(warm._noted) == 2
    few, many = ({launch.key for launch in warm._launches(count)} for count in (1, 4096))
    assert len(few) == len(many) == 2
    assert len(few | many) == 3, "the gate has another kernel for many tokens"
    assert warm.counts(100) == sorted(set(warm.counts(100)))
    assert warm.counts(8192)[-1] == 8192


def test_vllm_compiles_no_kernel_that_no_call_reaches(monkeypatch):
    from tk_serving_vllm import activate

    replaced = {"mhc-pre-broadcast", "mhc-pre", "mhc-post-pre", "mhc-post"}
    monkeypatch.setattr(activate, "replaced", lambda site: site in replaced)
    registered = []
    register = hyper_connections._register_warmup(lambda self, *args, **kwargs: registered.append((self, args, kwargs)))

    def kernel(name):
        return type(name, (), {})()

    for name in hyper_connections._COMPILED:
        register(kernel(name), "config", hidden_size=1)
    other = kernel("AnotherKernel")
    register(other, "config")
    assert [type(self).__name__ for self, _, _ in registered] == ["HcHeadFusedTileLangKernel", "AnotherKernel"]
    assert registered[0][1:] == (("config",), {"hidden_size": 1})


def test_a_site_is_replaced_if_it_is_patched_and_nothing_stays_stock(monkeypatch):
    from tk_serving_patches import Row
    from tk_serving_vllm import activate, table

    rows = [Row("a", "x", "patched"), Row("b", "x", "patched"), Row("c", "x", "skipped")]
    monkeypatch.setattr(activate.ledger, "rows", lambda: rows)
    monkeypatch.setattr(table, "verdict", lambda site: (False, "in part stock by table" if site == "b" else ""))
    assert [activate.replaced(site) for site in "abcd"] == [True, False, False, False]
