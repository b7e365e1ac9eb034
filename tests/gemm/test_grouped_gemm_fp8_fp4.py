"""FP8 x FP4 products by expert: numbers, regions of rows, the choice of a variant, messages."""

import pytest
import torch

from tk_serving import dispatch
from tk_serving.compile import ahead
from tk_serving.compile.targets import ARCHS
from tk_serving.config import settings
from tk_serving.gemm import grouped_gemm_fp8_fp4, tiles
from tk_serving.gemm.grouped_gemm_fp8_fp4 import HALF, SHAPES, expected_rows, shape_for
from tk_serving.moe import expand_to_fused_and_cast, get_fused_mapping
from tk_serving.moe.get_fused_mapping import capacity
from tk_serving.quant import marlin
from tk_serving.quant.formats import decode_e2m1

EXPERTS, M, K = 3, 128, 256


def operands(rows=40, seed=0):
    """Activations with scales by column, weights as in a checkpoint, and as tiles."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(rows, K, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(-6, 3, (K // 128, rows), generator=generator)
    codes = torch.randint(-128, 128, (EXPERTS, M, K // 2), generator=generator, dtype=torch.int8)
    scales = torch.randint(110, 125, (EXPERTS, M, K // 32), generator=generator, dtype=torch.uint8)
    weight = tiles.from_marlin(marlin.pack_codes(codes), marlin.pack_exponents(scales))
    dense = decode_e2m1(codes).double() * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    return (data, torch.exp2(exponents.float()).T), weight, dense


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_numbers_of_each_expert():
    x, weight, dense = operands()
    found = grouped_gemm_fp8_fp4(x, weight, ints(0, 16, 16), ints(11, 0, 20))
    values = x[0].double() * x[1].double().repeat_interleave(128, 1)
    for e, rows in ((0, slice(0, 11)), (2, slice(16, 36))):
        want = values[rows] @ dense[e].T
        assert torch.equal(found[rows], want.float().bfloat16()), f"expert {e}"


def test_after_the_operators_that_make_its_inputs():
    _, weight, dense = operands()
    tokens = torch.randn(20, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.rand(20, EXPERTS, generator=torch.Generator().manual_seed(2)).topk(2).indices.int()
    mapping = get_fused_mapping(ids, EXPERTS, capacity(40, EXPERTS, 8), 8, True)
    x = expand_to_fused_and_cast(tokens, "e4m3", 128, mapping[3], mapping[0], True, round_sf=True)
    found = grouped_gemm_fp8_fp4(x, weight, mapping[4], mapping[6])
    for choice in range(2):
        want = torch.einsum("tk,tmk->tm", tokens.double(), dense[ids[:, choice].long()])
        error = (found[mapping[3][:, choice].long()].double() - want).norm() / want.norm()
        assert error < 0.04  # of casting activations to e4m3


def test_rows_that_do_not_exist_are_skipped():
    x, weight, dense = operands(rows=10)
    found = grouped_gemm_fp8_fp4(x, weight, ints(0, 8, 99), ints(-5, 7, 8))
    want = x[0][8:].double() * x[1][8:].double().repeat_interleave(128, 1) @ dense[1].T
    assert torch.equal(found[8:], want.float().bfloat16())


def test_one_column_of_scales_has_no_order():
    x, weight, _ = operands()
    narrow = x[0][:, :128].contiguous(), x[1][:, :1].contiguous()
    found = grouped_gemm_fp8_fp4(narrow, (weight[0][:, :, :1].contiguous(), weight[1]), ints(0, 8, 16), ints(8, 8, 8))
    assert found.shape == (40, M)


def test_preallocated_result_is_returned():
    x, weight, _ = operands()
    out = torch.empty(40, M, dtype=torch.bfloat16)
    assert grouped_gemm_fp8_fp4(x, weight, ints(0, 8, 16), ints(8, 8, 8), out=out) is out


def test_no_rows():
    x, weight, _ = operands(rows=0)
    assert grouped_gemm_fp8_fp4(x, weight, ints(0, 0, 0), ints(0, 0, 0)).shape == (0, M)


@pytest.mark.parametrize(("pairs", "experts"), [(6, 256), (384, 256), (6144, 256), (49152, 32)])
def test_rows_of_an_expert_follow_from_the_room(pairs, experts):
    assert expected_rows(capacity(pairs, experts, 8), experts) == pytest.approx(pairs / experts, rel=0.1)


def test_more_rows_never_take_a_narrower_tile():
    widths = [shape_for(rows, 512).width for rows in (0.1, 1, 4, 8, 16, 32, 64, 200, 5000)]
    assert widths == sorted(widths)
    assert {widths[0], widths[-1]} == {SHAPES[0].width, SHAPES[-1].width}


def test_every_number_of_weight_rows_has_a_variant():
    for m in (128, 256, 384, 4096):
        for rows in (1, 10, 100, 1000):
            shape = shape_for(rows, m)
            assert shape in (*SHAPES, *HALF)
            assert m % (128 * shape.subtiles) == 0


def test_messages():
    x, weight, _ = operands()
    start = count = ints(0, 0, 0)
    name = "grouped_gemm_fp8_fp4"
    with pytest.raises(TypeError, match=rf"{name}: x\[0\]"):
        grouped_gemm_fp8_fp4((x[0].float(), x[1]), weight, start, count)
    with pytest.raises(ValueError, match=rf"{name}: x\[1\]: expected column-major scales"):
        grouped_gemm_fp8_fp4((x[0], x[1].contiguous()), weight, start, count)
    with pytest.raises(ValueError, match=rf"{name}: weight\[0\]: expected shape \[E, M / 64, 2, 4352\]"):
        grouped_gemm_fp8_fp4(x, (weight[0][:, :, :1], weight[1]), start, count)
    with pytest.raises(ValueError, match=rf"{name}: weight\[0\]: expected M / 64 with M a multiple of 128"):
        grouped_gemm_fp8_fp4(x, (weight[0][:, :1].contiguous(), weight[1][:, :64].contiguous()), start, count)
    with pytest.raises(ValueError, match=rf"{name}: num_tokens_per_expert"):
        grouped_gemm_fp8_fp4(x, weight, start, count[:2])
    with pytest.raises(ValueError, match=rf"{name}: rows_per_expert"):
        grouped_gemm_fp8_fp4(x, weight, start, count, 0.0)
    with pytest.raises(ValueError, match=rf"{name}: out: "):
        grouped_gemm_fp8_fp4(x, weight, start, count, out=torch.empty(40, 2 * M, dtype=torch.bfloat16))


def test_checks_refuse_regions_and_exponents_out_of_range(monkeypatch):
    monkeypatch.setattr(settings, "check", True)
    x, weight, _ = operands()
    with pytest.raises(ValueError, match="regions within 40 rows"):
        grouped_gemm_fp8_fp4(x, weight, ints(0, 16, 32), ints(8, 8, 9))
    weight[0][0, 0, 0, tiles.CODES] = tiles.REACH + 1
    with pytest.raises(ValueError, match="exponents up to 26"):
        grouped_gemm_fp8_fp4(x, weight, ints(0, 16, 32), ints(8, 8, 8))


@pytest.mark.parametrize(("capability", "implementation"), [((9, 0), "kernel"), ((10, 0), "reference")])
def test_other_devices_than_hopper_run_the_reference(capability, implementation, monkeypatch):
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    x, weight, _ = operands()
    operator = grouped_gemm_fp8_fp4.operator
    plan = operator.plan(x, weight, ints(0, 0, 0), ints(0, 0, 0), None, None)
    decision = dispatch.decide(operator, plan, torch.device("cuda", 0))
    assert decision.implementation == implementation
    assert decision.reason == ("" if implementation == "kernel" else "gemm.grouped_gemm_fp8_fp4 is for sm_90a only")


def test_kernels_are_built_for_hopper_only():
    wanted = {job.arch for job in ahead.jobs(["v4-flash"], ARCHS) if job.operator == "grouped_gemm_fp8_fp4"}
    assert wanted == {"sm_90a"}
