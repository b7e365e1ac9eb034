"""mHC, Engram, transposes and rotary past 2^31 elements: the last rows of a large call equal the same rows alone."""

import pytest
import torch
from on_device import needs_device, same, tensors

from tk_serving import dispatch
from tk_serving.operator import find
from tk_serving.workloads import Maker

FAR = 2**31
HIDDEN, STREAMS, MIXES = 4096, 4, 24
LAST = 22
TOKENS = FAR // (STREAMS * HIDDEN) + LAST // 2  # the streams of half of the last tokens start past 2^31 elements

pytestmark = [*needs_device(40), pytest.mark.large]


def call(name, *args, **options):
    return find(name).call(dispatch.KERNEL, *args, **options)


def long(*shape, dtype=torch.bfloat16):
    """Zeros with random rows at the end."""
    x = torch.zeros(TOKENS, *shape, dtype=dtype, device="cuda")
    x[-LAST:] = torch.randn(LAST, *shape, device="cuda").to(dtype)
    return x


def weights(mixes=MIXES):
    make = Maker("cuda")
    scale = make.randn(3 if mixes == MIXES else 1)
    return make.randn(mixes, STREAMS * HIDDEN, scale=(STREAMS * HIDDEN) ** -0.5), scale, make.randn(mixes)


def rows(result):
    """The last tokens of a result, whichever dimension they lie in."""
    return next(result.narrow(d, TOKENS - LAST, LAST) for d in range(result.dim()) if result.shape[d] == TOKENS)


def check(name, *args, **options):
    """All results for the last tokens, against a call with these tokens alone."""
    alone = [a[-LAST:].clone() if isinstance(a, torch.Tensor) and a.shape[0] == TOKENS else a for a in args]
    found = [r for r in tensors(call(name, *args, **options)) if TOKENS in r.shape]
    expected = [r for r in tensors(call(name, *alone, **options)) if LAST in r.shape]
    assert len(found) == len(expected) > 0
    for part, want in zip(found, expected, strict=True):
        same(rows(part), want)


GATES = (1e-6, 1e-6, 1e-6, 2.0, 20)
CAST = {"fmt": "e4m3", "use_tma_aligned_col_major_sf": True, "with_out_bf16": True}


def update():
    """Output of a sublayer, streams, post and combination mixes."""
    return long(HIDDEN), long(STREAMS, HIDDEN), long(STREAMS, 1, dtype=torch.float32), long(4, 4, dtype=torch.float32)


def test_l09_expand_to_mhc():
    check("expand_to_mhc", long(HIDDEN), STREAMS)


def test_l09_mhc_post():
    check("mhc_post", *update())


def test_l09_mhc_post_bwd():
    x, residual, post, comb = update()
    check("mhc_post_bwd", x, residual, post, comb, long(STREAMS, HIDDEN))


def test_l09_mhc_pre_apply_mix():
    check("mhc_pre_apply_mix", long(STREAMS, HIDDEN), long(STREAMS, 1, dtype=torch.float32))


def test_l09_mhc_pre_norm_gemm():
    check("mhc_pre_norm_gemm", long(STREAMS, HIDDEN), weights()[0], None)


def test_l09_mhc_pre_norm_gemm_bwd():
    """The gradient of the streams; that of the matrix is a sum over all tokens."""
    gradients = long(MIXES, dtype=torch.float32), long(dtype=torch.float32)
    check("mhc_pre_norm_gemm_bwd", long(STREAMS, HIDDEN), weights()[0], None, *gradients)


def test_l09_mhc_pre_big_fuse():
    check("mhc_pre_big_fuse", long(STREAMS, HIDDEN), *weights(), *GATES)


def test_l09_mhc_pre_fused():
    norm = torch.rand(HIDDEN, device="cuda")
    check("mhc_pre_fused", long(STREAMS, HIDDEN), *weights(), *GATES, norm_weight=norm, **CAST)


def test_l09_mhc_post_pre_fused():
    check("mhc_post_pre_fused", *update(), *weights(), *GATES, **CAST)


def test_l09_mhc_head_fused():
    check("mhc_head_fused", long(STREAMS, HIDDEN), *weights(4), 1e-6, 1e-6)


def test_l08_engram_token_stride():
    kv = torch.empty(FAR + 2**20, dtype=torch.bfloat16, device="cuda").as_strided((2, 5, 256), (FAR, 256, 1))
    kv.copy_(torch.randn(2, 5, 256))
    x, w = torch.randn(2, 4, 256, device="cuda").bfloat16(), torch.randn(4, 256, device="cuda")
    strided = call("engram_gate_fwd", x, kv[:, :4], kv[:, 4], w, 1e-6, 1e-6)
    alone = call("engram_gate_fwd", x, kv[:, :4].contiguous(), kv[:, 4].contiguous(), w, 1e-6, 1e-6)
    for part, want in zip(strided, alone, strict=True):
        same(part, want)


@pytest.mark.parametrize("inplace", [False, True])
def test_l09_engram(inplace):
    x, k, v, w = long(4, HIDDEN), long(4, HIDDEN), long(HIDDEN), torch.randn(4, HIDDEN, device="cuda")
    alone = call("engram_gate_fwd", *(t[-LAST:].clone() for t in (x, k, v)), w, 1e-6, 1e-6)
    found = call("engram_gate_fwd", x, k, v, w, 1e-6, 1e-6, inplace=inplace)
    for part, want in zip(found, alone, strict=True):
        same(part[-LAST:], want)


def test_l09_engram_bwd():
    x, k, v, w = long(4, HIDDEN), long(4, HIDDEN), long(HIDDEN), torch.randn(4, HIDDEN, device="cuda")
    _, *saved = call("engram_gate_fwd", x, k, v, w, 1e-6, 1e-6)
    arguments = (long(4, HIDDEN), x, k, v, w, *saved)
    found = call("engram_gate_bwd", *arguments, 1e-6)
    alone = call("engram_gate_bwd", *(a[-LAST:].clone() if a is not w else w for a in arguments), 1e-6)
    for part, want in zip(found[:3], alone[:3], strict=True):
        same(part[-LAST:], want)


@pytest.mark.parametrize("columns", [512, 100])
def test_l08_transpose_row_stride(columns):
    """A 32-bit product of row and stride would be negative from the second row on."""
    x = torch.empty(FAR + 2**20, dtype=torch.bfloat16, device="cuda").as_strided((2, columns), (FAR, 1))
    x.copy_(torch.randn(2, columns))
    same(call("transpose", x), x.clone().t())


def test_l09_transpose():
    x = torch.zeros(8388624, 260, dtype=torch.int8, device="cuda")
    x[-3:, -5:] = torch.arange(15, device="cuda").view(3, 5)
    y = call("transpose", x)
    assert torch.equal(y[-5:, -3:], x[-3:, -5:].t())
    assert int(y.to(torch.bool).sum()) == 14


def test_l09_batched_transpose():
    """The last of three matrices of 2^30 elements."""
    x = torch.zeros(3, 2**15, 2**15, dtype=torch.int8, device="cuda")
    x[-1, -3:, -5:] = torch.arange(15, device="cuda").view(3, 5)
    y = call("batched_transpose", x)
    assert torch.equal(y[-1, -5:, -3:], x[-1, -3:, -5:].t())
    assert int(y.to(torch.bool).sum()) == 14


def test_l08_rotary_token_stride():
    query = torch.empty(FAR + 2**20, dtype=torch.bfloat16, device="cuda").as_strided((2, 3, 64), (FAR, 64, 1))
    query.copy_(torch.randn(2, 3, 64))
    alone = query.clone()
    angles = torch.rand(2, 32, device="cuda")
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    for rotated in (query, alone):
        call("apply_rotary", rotated, table)
    same(query, alone)
