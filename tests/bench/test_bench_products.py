"""Products of FP8 blocks by DeepGEMM: the calls get scales that its kernels read, and give the operator's result."""

from types import SimpleNamespace

import pytest
import torch

from tk_serving.bench.peers import deepgemm
from tk_serving.gemm.skinny_gemm_fp8 import skinny_gemm_fp8
from tk_serving.operator import find
from tk_serving.workloads import Maker

OPERATOR = find("skinny_gemm_fp8")


@pytest.fixture
def engine():
    """DeepGEMM's two functions by the reference, which refuse scales that would be transposed first."""
    calls = []

    def aligned(sf):
        rows, *_, columns = sf.stride()
        return rows == 1 and columns % 4 == 0 and columns >= len(sf)

    def gemm(x, weight, out, disable_ue8m0_cast):
        assert aligned(x[1])
        calls.append(disable_ue8m0_cast)
        out.copy_(skinny_gemm_fp8(x, weight))

    def einsum(expression, x, weight, out, recipe):
        assert aligned(x[1])
        assert x[0].transpose(0, 1).is_contiguous()
        calls.append((expression, recipe))
        out.copy_(skinny_gemm_fp8(x, weight))

    return SimpleNamespace(fp8_gemm_nt=gemm, fp8_einsum=einsum, calls=calls)


@pytest.mark.parametrize("by_columns", [True, False])
@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_the_peers_call(engine, tokens, groups, by_columns):
    sizes = {"n": 48, "k": 640, "groups": groups, "by_columns": by_columns}
    x, weight, *_ = OPERATOR.inputs(Maker(), tokens=tokens, **sizes)
    call = deepgemm.products(engine, x, weight, **({} if groups else {"disable_ue8m0_cast": True}))
    torch.testing.assert_close(call.result(call.run()), skinny_gemm_fp8(x, weight))
    assert engine.calls == [("bhr,hdr->bhd", (1, 128, 128)) if groups else True]
