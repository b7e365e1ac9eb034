"""Products of few rows: vLLM's FP8 linear layers and V4's output projection beside a model of DeepGEMM."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tk_serving import dispatch
from tk_serving.config import settings

pytest.importorskip("vllm")

import vllm.model_executor.kernels.linear.scaled_mm.deep_gemm  # noqa: F401  registers the operator
from vllm.models.deepseek_v4.nvidia.ops import o_proj
from vllm.utils import deep_gemm

from tk_serving_patches import Ledger, comparing, warm
from tk_serving_vllm import table
from tk_serving_vllm.sites import dense_products

OPERATOR = "skinny_gemm_fp8"
FP8 = torch.float8_e4m3fn
GROUPS, RANK, HEADS, HEAD = 2, 48, 2, 128


def exact(x, weight):
    """The product in double precision, block by block."""
    (data, sf), (w, w_sf) = x, weight
    out = torch.zeros(len(data), len(w), dtype=torch.float64)
    for n in range(0, len(w), 128):
        for k in range(0, w.shape[1], 128):
            block = data[:, k : k + 128].double() @ w[n : n + 128, k : k + 128].double().T
            out[:, n : n + 128] += block * sf[:, k // 128, None].double() * w_sf[n // 128, k // 128].double()
    return out


@pytest.fixture
def theirs(monkeypatch):
    """DeepGEMM's two functions; the calls that reach them."""
    calls = []

    def gemm(x, weight, out, c=None, disable_ue8m0_cast=None):
        calls.append((x, weight, out, disable_ue8m0_cast))
        out.copy_(exact(x, weight))

    def einsum(expression, x, weight, out, recipe):
        calls.append((expression, x, weight, out, recipe))
        for g in range(out.shape[1]):
            out[:, g] = exact((x[0][:, g], x[1][:, g]), (weight[0][g], weight[1][g]))

    monkeypatch.setattr(deep_gemm, "_fp8_gemm_nt_impl", gemm)
    monkeypatch.setattr(deep_gemm, "_fp8_einsum_impl", einsum)
    return calls


@pytest.fixture
def applied():
    ledger = Ledger()

    def apply(**changes):
        for site in dense_products.SITES:
            rows = ledger.apply(dataclasses.replace(site, unsuitable=lambda: None, sources={}, **changes))
            assert [row.status for row in rows] == ["patched"], rows

    yield apply
    ledger.revert()


def reasons():
    return [row["reason"] for row in dispatch.counters() if row["implementation"] == "engine"]


def rows_of(m, k, seed=1):
    """Rows and column-major scales, each column on a 16-byte boundary, as vLLM's cast leaves them."""
    make = torch.Generator().manual_seed(seed)
    sf = torch.zeros(k // 128, -(-m // 4) * 4).T[:m]
    sf.copy_(torch.rand(m, k // 128, generator=make) / 16)
    return torch.randn(m, k, generator=make).to(FP8), sf


def weight_of(n, k, seed=2):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=make).to(FP8), torch.rand(-(-n // 128), k // 128, generator=make) / 16


def linear(x, weight, dtype=torch.bfloat16):
    """As ``DeepGemmFp8BlockScaledMMKernel.apply_block_scaled_mm``."""
    out = torch.full((len(x[0]), len(weight[0])), float("nan"), dtype=dtype)
    torch.ops.vllm.fp8_gemm_nt_op(*x, *weight, out, True)
    return out


def close(ours, expected):
    torch.testing.assert_close(ours.double(), expected.double(), rtol=2**-7, atol=2**-8)


# -- linear layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(1, 144, 256), (3, 2112, 128), (8, 256, 640), (16, 64, 384)])
def test_vllms_operator_multiplies_few_rows_with_ours(theirs, applied, m, n, k):
    x, weight = rows_of(m, k), weight_of(n, k)
    stock = linear(x, weight)
    assert len(theirs) == 1
    applied()
    ours = linear(x, weight)
    assert len(theirs) == 1, "DeepGEMM is not called"
    close(ours, stock)
    close(ours, exact(x, weight))
    assert reasons() == []
    assert [(row["operator"], row["calls"]) for row in dispatch.counters()] == [(OPERATOR, 1)]


def test_compiled_models_call_the_operator_too(theirs, applied):
    x, weight = rows_of(4, 256), weight_of(64, 256)
    applied()

    @torch.compile(backend="eager", fullgraph=True)
    def layer(data, sf, w, w_sf):
        out = data.new_empty(len(data), len(w), dtype=torch.bfloat16)
        torch.ops.vllm.fp8_gemm_nt_op(data, sf, w, w_sf, out, True)
        return out * 2

    close(layer(*x, *weight) / 2, exact(x, weight))
    assert theirs == []


def test_no_rows(theirs, applied):
    applied()
    assert linear(rows_of(0, 128), weight_of(16, 128)).shape == (0, 16)
    assert theirs == []


def misaligned(tensor):
    spare = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return spare[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, w: (rows_of(17, 256), w), "more than 16 rows"),
        (lambda x, w: ((x[0], x[1].int()), w), "scales of torch.int32 and torch.float32"),
        (lambda x, w: (x, (w[0], w[1].int())), "scales of torch.float32 and torch.int32"),
        (lambda x, w: (x, weight_of(24, 256)), "multiple of 16, got 24"),
        (lambda x, w: ((misaligned(x[0]), x[1]), w), "multiples of 16 bytes"),
        (lambda x, w: (x, (misaligned(w[0]), w[1])), "multiples of 16 bytes"),
        (lambda x, w: (x, (w[0], w[1][:, :1])), "weight[1]"),
    ],
)
def test_other_products_reach_deepgemm_unchanged(theirs, applied, monkeypatch, change, reason):
    x, weight = change(rows_of(3, 256), weight_of(64, 256))
    monkeypatch.setattr(deep_gemm, "_fp8_gemm_nt_impl", lambda *args, **kwargs: theirs.append((args, kwargs)))
    applied()
    linear(x, weight)
    ((args, kwargs),) = theirs
    assert [t.data_ptr() for pair in args[:2] for t in pair] == [t.data_ptr() for t in (*x, *weight)]
    assert kwargs == {"disable_ue8m0_cast": False}
    (found,) = reasons()
    assert reason in found


def test_other_arguments_and_results_reach_deepgemm(theirs, applied):
    x, weight = rows_of(3, 256), weight_of(64, 256)
    applied()
    out = torch.empty(3, 64, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(x, weight, out, c=out, is_deep_gemm_e8m0_used=False)
    close(linear(x, weight, torch.float32), exact(x, weight))
    wide = torch.empty(3, 128, dtype=torch.bfloat16)[:, :64]
    deep_gemm.fp8_gemm_nt(x, weight, wide, is_deep_gemm_e8m0_used=False)
    close(wide, exact(x, weight))
    assert [call[3] for call in theirs] == [True, False, True]
    assert sorted(reasons()) == [
        "arguments that a linear layer does not have",
        "results of torch.bfloat16 with strides [128, 1]",
        "results of torch.float32 with strides [64, 1]",
    ]


def test_rows_that_flashinfer_multiplies_are_counted(applied):
    from vllm.model_executor.kernels.linear.scaled_mm import flashinfer

    x, (w, w_sf) = torch.zeros(5, 256, dtype=torch.bfloat16), weight_of(64, 256)

    def multiply():
        with pytest.raises(RuntimeError, match="FlashInfer backend is not available"):  # FlashInfer's, on the CPU build
            flashinfer.flashinfer_fp8_blockscale_gemm(input=x, weight=w, weight_scale=w_sf, out_dtype=x.dtype)

    multiply()
    assert reasons() == []
    applied()
    multiply()
    assert reasons() == ["vLLM chose FlashInfer for linear layers"]


# -- output projection ---------------------------------------------------------------------------------------------


def rotated(m, width=HEADS * HEAD, seed=3):
    """Rows and scales in the memory that vLLM's inverse rotary embedding gives them."""
    make = torch.Generator().manual_seed(seed)
    data = torch.randn(GROUPS, m, width, generator=make).to(FP8)
    inner, aligned = width // 128, -(-m // 4) * 4
    sf = torch.full((GROUPS * inner * aligned,), float("nan"))
    sf = sf.as_strided((GROUPS, m, inner), (inner * aligned, 1, aligned))
    sf.copy_(torch.rand(GROUPS, m, inner, generator=make) / 16)
    return data.transpose(0, 1), sf.transpose(0, 1)


def grouped_weight(n=RANK, k=HEADS * HEAD):
    parts = [weight_of(n, k, seed) for seed in range(GROUPS)]
    return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])


def project(m, weight, monkeypatch, recipe=(1, 128, 128)):
    """vLLM's function from the attention's output to the second projection, with rows that are cast already."""
    x = rotated(m)
    monkeypatch.setattr(o_proj, "fused_inv_rope_fp8_quant", lambda *args, **kwargs: x)
    layer = SimpleNamespace(weight=weight[0], weight_scale_inv=weight[1])
    sizes = {"n_groups": GROUPS, "heads_per_group": HEADS, "nope_dim": 64, "rope_dim": 64, "o_lora_rank": RANK}
    return o_proj.deep_gemm_fp8_o_proj(
        None, None, None, layer, lambda z: z.clone(), **sizes, einsum_recipe=recipe, tma_aligned_scales=False
    )


@pytest.mark.parametrize("m", [1, 5, 16])
def test_each_group_of_heads_has_its_weights(theirs, applied, monkeypatch, m):
    weight = grouped_weight()
    stock = project(m, weight, monkeypatch)
    assert len(theirs) == 1
    applied()
    ours = project(m, weight, monkeypatch)
    assert len(theirs) == 1, "DeepGEMM is not called"
    assert ours.shape == (m, GROUPS * RANK)
    close(ours, stock)
    assert reasons() == []


def test_other_einsums_reach_deepgemm(theirs, applied, monkeypatch):
    x, weight = rotated(4), grouped_weight()
    out = torch.empty(4, GROUPS, RANK, dtype=torch.bfloat16)
    applied()
    project(17, weight, monkeypatch)
    project(4, weight, monkeypatch, recipe=(1, 1, 128))
    deep_gemm.fp8_einsum("bhd,hdr->bhr", x, weight, out, recipe=(1, 128, 128))
    assert [(call[0], call[4]) for call in theirs] == [
        ("bhr,hdr->bhd", (1, 128, 128)),
        ("bhr,hdr->bhd", (1, 1, 128)),
        ("bhd,hdr->bhr", (1, 128, 128)),
    ]
    assert set(reasons()) == {"more than 16 rows", "another einsum than bhr,hdr->bhd in blocks of 128 x 128"}


# -- around the calls ----------------------------------------------------------------------------------------------


def test_kernels_for_few_rows_are_known_from_a_profiling_run_with_many(theirs, applied, monkeypatch):
    applied()
    warm.start()
    linear(rows_of(64, 256), weight_of(64, 256))
    project(64, grouped_weight(), monkeypatch)
    monkeypatch.setattr(warm, "_open", False)
    assert reasons() == ["more than 16 rows"]
    plan = dense_products.skinny_gemm_fp8.operator.plan
    few = {launch.key for m in (1, 16) for launch in warm._launches(m)}
    for m in (1, 16):
        wanted = plan(rows_of(m, 256), weight_of(64, 256), True).launches
        wanted += plan(rotated(m), grouped_weight(), True).launches
        assert {launch.key for launch in wanted} <= few
    assert list(warm._launches(17)) == []


def test_calls_are_compared_with_deepgemms(theirs, applied, monkeypatch):
    monkeypatch.setattr(settings, "compare", True)
    applied()
    x, weight = rows_of(4, 256), weight_of(64, 256)
    linear(x, weight)
    project(4, grouped_weight(), monkeypatch)
    assert [(row["site"], row["calls"], row["beyond"]) for row in comparing.rows()] == [
        ("fp8-linear", 1, 0),
        ("output-projection", 1, 0),
    ]
    assert comparing.first() is None

    def other(x, weight, out, **kwargs):
        out.copy_(exact(x, (weight[0], weight[1] * 1.02)))

    monkeypatch.setattr(deep_gemm, "_fp8_gemm_nt_impl", other)
    linear(x, weight)
    assert comparing.first() == "fp8-linear"


def test_results_that_must_not_depend_on_the_number_of_tokens_stay_with_vllm(monkeypatch):
    monkeypatch.setattr(dense_products, "on", lambda platform: lambda: None)
    assert [site.unsuitable() for site in dense_products.SITES] == [None, None]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert {site.unsuitable() for site in dense_products.SITES} == {"results must not depend on the number of tokens"}


def test_the_table_leaves_calls_to_deepgemm(theirs, applied, monkeypatch):
    slower = {"fp8-linear": {"v3": [[1, 1.3], [16, 0.5]]}}
    monkeypatch.setattr(table.measured, "read", lambda: {"sites": slower})
    table.choose(7168, 256)
    try:
        applied()
        for m in (1, 15):
            linear(rows_of(m, 128), weight_of(16, 128))
    finally:
        table.forget()
    assert len(theirs) == 1
    assert reasons() == ["0.50x vLLM's speed at 16 tokens in the record"]
