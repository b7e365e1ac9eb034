"""V4's inverse rotary embedding with its cast: the site beside vLLM's wrapper and a model of its Triton kernel."""

import dataclasses
import importlib

import pytest
import torch

from tk_serving import dispatch
from tk_serving.config import settings

pytest.importorskip("vllm")

from vllm.models.deepseek_v4.nvidia.ops import o_proj

from tk_serving_patches import Ledger, comparing, warm
from tk_serving_vllm.sites import inverse_rotary

OPERATOR = "apply_rotary_and_per_token_cast"
GROUPS, HEADS, NOPE, ROPE = 2, 3, 192, 64
ROWS = 40


def theirs(o, positions, cache, out, scale, num_tokens, *, nope_dim, half_rope, quant_group_size, fp8_max, **rest):
    """What the Triton kernel writes, in float32 with the fused multiply-add that its compiler makes."""
    x = o.float()
    turned, partner = x[..., nope_dim:].double(), x[..., nope_dim:].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    cos, sin = (part.repeat_interleave(2, -1)[:, None] for part in cache[positions].split(half_rope, -1))
    sign = torch.tensor([1.0, -1.0]).repeat(half_rope)
    x[..., nope_dim:] = (turned * cos.double() + (partner * sin * sign).double()).float()
    if not rest["quantize"]:
        out.copy_(x.view(num_tokens, len(out), -1).transpose(0, 1))
        return
    groups = x.view(num_tokens, len(out), -1, quant_group_size)
    largest = groups.abs().amax(-1).clamp(min=1e-10)
    scales = torch.exp2((largest * torch.tensor(1 / fp8_max)).log2().ceil())
    codes = (groups / scales[..., None]).clamp(-fp8_max, fp8_max).to(torch.float8_e4m3fn)
    out.view(torch.uint8).copy_(codes.flatten(-2).transpose(0, 1).view(torch.uint8))
    padded = scale.as_strided((scale.shape[0] * scale.shape[2], scale.stride(2)), (scale.stride(2), 1))
    padded.zero_()
    scale.copy_(scales.transpose(0, 1))


@pytest.fixture
def calls(monkeypatch):
    """The calls that reach vLLM's kernel."""
    found = []
    module = importlib.import_module(inverse_rotary._FUSED)

    def kernel(*args, **kwargs):
        found.append(kwargs)
        theirs(*args, **kwargs)

    monkeypatch.setattr(module, "_FUSED_INV_ROPE_FP8_QUANT_KERNEL", kernel)
    monkeypatch.setattr(module.current_platform, "is_arch_support_pdl", lambda: True, raising=False)
    return found


@pytest.fixture
def applied():
    ledger = Ledger()

    def apply():
        (site,) = inverse_rotary.SITES
        rows = ledger.apply(dataclasses.replace(site, unsuitable=lambda: None, sources={}))
        assert [row.status for row in rows] == ["patched"], rows

    yield apply
    ledger.revert()


def reasons():
    return [row["reason"] for row in dispatch.counters() if row["implementation"] == "engine"]


def inputs(tokens, padded_heads=0):
    make = torch.Generator().manual_seed(tokens)
    heads = GROUPS * HEADS
    o = torch.randn(tokens, max(heads, padded_heads), NOPE + ROPE, generator=make).bfloat16()[:, :heads]
    angles = torch.rand(ROWS, ROPE // 2, generator=make) * 6.28
    positions = torch.randint(0, ROWS, (tokens,), generator=make)
    return o, positions, torch.cat((angles.cos(), angles.sin()), dim=1)


def cast(*args, **change):
    """As ``deep_gemm_fp8_o_proj`` does on Hopper, from the name by which it looks the function up."""
    sizes = {"n_groups": GROUPS, "heads_per_group": HEADS, "nope_dim": NOPE, "rope_dim": ROPE, "quant_group_size": 128}
    return o_proj.fused_inv_rope_fp8_quant(*args, **sizes | {"tma_aligned_scales": False, "quantize": True} | change)


def bits(tensor):
    """Of all its storage, padding rows included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@pytest.mark.parametrize(("tokens", "padded_heads"), [(1, 0), (4, 8), (7, 8), (33, 0)])
def test_the_same_bytes_in_the_same_layout(calls, applied, tokens, padded_heads):
    given = inputs(tokens, padded_heads)
    stock, stock_sf = cast(*given)
    assert len(calls) == 1
    applied()
    data, sf = cast(*given)
    assert len(calls) == 1, "vLLM's kernel is not called"
    for ours, expected in ((data, stock), (sf, stock_sf)):
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
        assert [s for s, n in zip(ours.stride(), ours.shape, strict=True) if n > 1] == [
            s for s, n in zip(expected.stride(), expected.shape, strict=True) if n > 1
        ]
        assert torch.equal(bits(ours), bits(expected))
    assert reasons() == []
    assert [(row["operator"], row["calls"]) for row in dispatch.counters()] == [(OPERATOR, 1)]


def test_no_tokens(calls, applied):
    applied()
    data, sf = cast(*inputs(0))
    assert (data.shape, sf.shape) == ((0, GROUPS, HEADS * 256), (0, GROUPS, HEADS * 2))
    assert calls == []


def test_results_in_bfloat16_stay_with_vllm(calls, applied):
    given = inputs(5)
    stock, _ = cast(*given, quantize=False)
    applied()
    data, sf = cast(*given, quantize=False)
    assert data.dtype == torch.bfloat16
    assert torch.equal(data, stock)
    assert sf.numel() == 0
    assert len(calls) == 2
    assert reasons() == ["results in bfloat16"]


def misaligned(tensor):
    spare = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return spare[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (None, {"tma_aligned_scales": True}, "packed scales"),
        (None, {"quant_group_size": 32}, "groups of 32 channels"),
        (None, {"heads_per_group": 2}, "[6, 256] for 2 x 2 heads of 192 + 64"),
        (None, {"nope_dim": 64}, "[6, 256] for 2 x 3 heads of 64 + 64"),
        (None, {"nope_dim": 224, "rope_dim": 32}, "a cache of shape [40, 64] for 32 channels"),
        (lambda o, at, cache: (o.float(), at, cache), {}, "x: expected dtype bfloat16, got float32"),
        (lambda o, at, cache: (misaligned(o), at, cache), {}, "multiples of 16 bytes"),
        (lambda o, at, cache: (o, at[:3], cache), {}, "positions: expected shape [5], got [3]"),
        (lambda o, at, cache: (o, at, cache.double()), {}, "cos_sin_cache: expected dtype float32, got float64"),
    ],
)
def test_other_calls_reach_vllm_unchanged(applied, monkeypatch, change, options, reason):
    given = inputs(5)
    given = given if change is None else change(*given)
    reached = []

    def original(*args):
        reached.append(args)
        return "theirs"

    replaced = inverse_rotary._fused_inv_rope_fp8_quant(original)
    monkeypatch.setattr(o_proj, "fused_inv_rope_fp8_quant", replaced)
    assert cast(*given, **options) == "theirs"
    ((o, positions, cache, *rest),) = reached
    assert (o is given[0], positions is given[1], cache is given[2]) == (True, True, True)
    expected = {"n": GROUPS, "heads_per_group": HEADS, "nope_dim": NOPE, "rope_dim": ROPE, "quant_group_size": 128}
    assert rest == list((expected | {"tma_aligned_scales": False, "quantize": True} | options).values())
    (found,) = reasons()
    assert reason in found


def test_compiled_code_calls_the_operator(calls, applied):
    given = inputs(6)
    stock = cast(*given)
    applied()

    @torch.compile(backend="eager", fullgraph=True)
    def layer(o, positions, cache):
        data, sf = o_proj.fused_inv_rope_fp8_quant(o, positions, cache, GROUPS, HEADS, NOPE, ROPE)
        return data.view(torch.uint8), sf * 2

    data, sf = layer(*given)
    assert torch.equal(data, stock[0].view(torch.uint8))
    assert torch.equal(sf / 2, stock[1])
    assert len(calls) == 1


@pytest.mark.parametrize("padded_heads", [0, 8])
def test_kernels_for_other_numbers_of_tokens_are_known_from_one_call(calls, applied, monkeypatch, padded_heads):
    applied()
    warm.start()
    cast(*inputs(64, padded_heads))
    monkeypatch.setattr(warm, "_open", False)
    plan = inverse_rotary.apply_rotary_and_per_token_cast.operator.plan
    for tokens in (1, 16, 4096):
        o, positions, cache = inputs(tokens, padded_heads)
        wanted = {launch.key for launch in plan(o, cache, positions, GROUPS, True).launches}
        assert wanted <= {launch.key for launch in warm._launches(tokens)}


def test_calls_are_compared_with_vllms(calls, applied, monkeypatch):
    monkeypatch.setattr(settings, "compare", True)
    applied()
    cast(*inputs(7, 8))
    assert [(row["site"], row["calls"], row["beyond"], row["largest"]) for row in comparing.rows()] == [
        ("inverse-rotary", 1, 0, 0.0)
    ]
    o, positions, cache = inputs(7, 8)
    module = importlib.import_module(inverse_rotary._FUSED)

    def other(o, positions, *rest, **kwargs):
        theirs(o, (positions + 1) % ROWS, *rest, **kwargs)

    monkeypatch.setattr(module, "_FUSED_INV_ROPE_FP8_QUANT_KERNEL", other)
    cast(o, positions, cache)
    assert comparing.first() == "inverse-rotary"
