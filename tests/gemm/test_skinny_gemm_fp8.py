"""Products of few FP8 rows: numbers, layouts, every variant, messages."""

import pytest
import torch

from tk_serving.config import settings
from tk_serving.gemm import skinny_gemm_fp8
from tk_serving.gemm.skinny_gemm_fp8 import MAX_ROWS, WARPS, config
from tk_serving.quant import per_block_cast, per_token_cast

OPERATOR = skinny_gemm_fp8.operator
N, K = 144, 640


def operands(rows=3, groups=0, n=N, k=K):
    generator = torch.Generator().manual_seed(rows)
    lead = (groups,) if groups else ()
    data = torch.randn(rows, *lead, k, generator=generator).to(torch.float8_e4m3fn)
    sf = torch.rand(rows, *lead, k // 128, generator=generator)
    w = torch.randn(*lead, n, k, generator=generator).to(torch.float8_e4m3fn)
    w_sf = torch.rand(*lead, -(-n // 128), k // 128, generator=generator)
    return (data, sf), (w, w_sf)


def exact(x, weight):
    (data, sf), (w, w_sf) = x, weight
    values = data.double() * sf.double().repeat_interleave(128, -1)
    blocks = w_sf.double().repeat_interleave(128, -1).repeat_interleave(128, -2)[..., : w.shape[-2], :]
    return torch.einsum("m...k,...nk->m...n", values, w.double() * blocks)


@pytest.mark.parametrize("groups", [0, 3])
def test_numbers(groups):
    x, weight = operands(groups=groups)
    found = skinny_gemm_fp8(x, weight)
    assert found.shape == ((3, 3, N) if groups else (3, N))
    assert torch.allclose(found.double(), exact(x, weight), rtol=2**-8, atol=1e-3)


def test_after_the_operators_that_make_its_inputs():
    generator = torch.Generator().manual_seed(1)
    tokens, weights = (torch.randn(n, K, generator=generator).bfloat16() for n in (4, N))
    x = per_token_cast(tokens, "e4m3", 128, use_tma_aligned_col_major_sf=True, round_sf=True)
    found = skinny_gemm_fp8(x, per_block_cast(weights, "e4m3", (128, 128)))
    want = tokens.double() @ weights.double().T
    assert (found.double() - want).norm() / want.norm() < 0.05  # of casting both to e4m3


@pytest.mark.parametrize(("split", "ahead"), [(1, 3), (2, 3), (4, 3), (8, 3), (8, 5)])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_every_variant(monkeypatch, split, ahead, rows):
    chosen = {"tokens": 1 if rows <= 8 else 2, "split": split, "ahead": ahead, "blocks": 1}
    monkeypatch.setitem(OPERATOR.plan.__globals__, "config", lambda *_: chosen)
    for slices in (1, 7):  # fewer than the warps that divide them; several turns
        x, weight = operands(rows, k=128 * slices)
        launches = OPERATOR.plan(x, weight, True).launches
        assert launches[0].config.items() >= chosen.items()
        found = OPERATOR.call("simulator", x, weight, True).double()
        assert torch.allclose(found, exact(x, weight), rtol=2**-8, atol=1e-3)


def test_strides():
    """Activations and scales as vLLM's output projection has them: group by group, scales by column."""
    (data, sf), (w, w_sf) = operands(5, groups=2)
    x = data.transpose(0, 1).contiguous().transpose(0, 1), sf.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    weight = w, w_sf.transpose(1, 2).contiguous().transpose(1, 2)
    want = skinny_gemm_fp8((data, sf), (w, w_sf))
    assert torch.equal(skinny_gemm_fp8(x, weight), want)
    assert torch.equal(OPERATOR.call("simulator", x, weight), OPERATOR.call("simulator", (data, sf), (w, w_sf)))


def test_a_row_does_not_depend_on_the_others():
    (data, sf), weight = operands(16)
    whole = OPERATOR.call("simulator", (data, sf), weight)
    for rows in (slice(0, 1), slice(4, 12)):
        part = OPERATOR.call("simulator", (data[rows], sf[rows]), weight)
        assert torch.equal(part, whole[rows])


def test_channels_are_divided_so_that_blocks_run_at_once():
    assert config(1, 32768, 1024, 1)["split"] == 1
    assert config(1, 1024, 4096, 8)["split"] == 4
    assert config(1, 4096, 8192, 1)["split"] == WARPS
    assert config(9, 1536, 4096, 1) == {"tokens": 2, "split": WARPS, "ahead": 5, "blocks": 1}


@pytest.mark.parametrize("early", [True, False])
def test_weights_are_read_early_if_they_are_constant(monkeypatch, early):
    monkeypatch.setattr(settings, "pdl", early)
    x, weight = operands()
    (constant,), (other,) = (OPERATOR.plan(x, weight, c).launches for c in (True, False))
    assert (constant.config["weights_first"], constant.pdl) == (early, False)
    assert (other.config["weights_first"], other.pdl) == (False, early)


def test_messages():
    (data, sf), (w, w_sf) = operands()
    many = operands(MAX_ROWS + 1)[0]
    for message, x, weight in (
        (f"x\\[0\\]: expected at most {MAX_ROWS} rows, got 17", many, (w, w_sf)),
        ("x\\[0\\]: expected dtype float8_e4m3fn", (data.float(), sf), (w, w_sf)),
        ("x\\[1\\]: expected shape \\[3, 5\\]", (data, sf[:, :4]), (w, w_sf)),
        ("weight\\[0\\]: expected N that is a positive multiple of 16, got 100", (data, sf), (w[:100], w_sf)),
        (
            "weight\\[0\\]: expected shape \\['N', 640\\]|weight\\[0\\]: expected shape \\[N, 640\\]",
            (data, sf),
            (w[:, :512], w_sf),
        ),
        ("weight\\[1\\]: expected shape \\[2, 5\\]", (data, sf), (w, w_sf[:1])),
    ):
        with pytest.raises((TypeError, ValueError), match=f"skinny_gemm_fp8: {message}"):
            skinny_gemm_fp8(x, weight)


def test_rows_that_do_not_begin_at_words_are_refused():
    (_, sf), weight = operands()
    shifted = torch.zeros(3 * K + 1, dtype=torch.uint8)[1:].view(3, K).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="begin at aligned addresses, multiples of 16 bytes"):
        skinny_gemm_fp8((shifted, sf), weight)
