"""Launches that start early, in a CUDA graph: each reads what the one before wrote and overwrites what it read."""

import pytest
import torch
from on_device import bits, needs_device

from tk_serving import config
from tk_serving.gemm import skinny_gemm_fp8
from tk_serving.moe import expand_to_fused_and_cast, get_fused_mapping
from tk_serving.moe.get_fused_mapping import capacity
from tk_serving.quant import norm_forward, per_token_cast

pytestmark = needs_device()

STEPS, REPLAYS, HIDDEN = 12, 8, 4096


def norms_and_casts(tokens):
    """One call after another through the same few buffers; torch's copies, which do not wait, stand between some."""
    random = torch.Generator("cuda").manual_seed(tokens)
    values = torch.randn(STEPS, tokens, HIDDEN, device="cuda", generator=random).bfloat16()
    weight = torch.randn(HIDDEN, device="cuda", generator=random).bfloat16()
    x, y = torch.empty_like(values[0]), torch.zeros_like(values[0])
    data, sf = per_token_cast(y, "e4m3", 128, use_tma_aligned_col_major_sf=True)
    for k in range(STEPS):
        yield lambda k=k: x.copy_(values[k])
        yield lambda: norm_forward(x, weight, 1e-6, out=y)
        yield lambda: per_token_cast.operator.into((data, sf), y, "e4m3", 128, use_tma_aligned_col_major_sf=True)
        if k % 2:
            yield lambda: norm_forward(y, weight, 1e-6, out=y)  # overwrites what the cast reads
        yield lambda: data.clone()
        yield lambda: sf.clone()


def mappings_and_expansions(tokens):
    """Operators of several launches, which share scratch memory that later calls take over."""
    random = torch.Generator("cuda").manual_seed(tokens)
    experts, topk = 32, 6
    chosen = torch.rand(STEPS, tokens, experts, device="cuda", generator=random).argsort(dim=-1)[..., :topk]
    ids, rows = chosen[0].clone(), capacity(tokens * topk, experts, 128)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=random).bfloat16()

    def expand():
        found = get_fused_mapping(ids, experts, rows, 128, True)
        return expand_to_fused_and_cast(x, "e4m3", 128, found[3], found[0], True)

    for k in range(STEPS):
        yield lambda k=k: ids.copy_(chosen[k])
        yield expand


def products_of_few_rows(tokens):
    """Weights are read before the launch before has ended; rows and scales must not be."""
    random = torch.Generator("cuda").manual_seed(tokens)
    rows, sf_of_weights = min(tokens, 16), torch.full((HIDDEN // 128, HIDDEN // 128), 1 / 64, device="cuda")
    weights = torch.randn(STEPS, HIDDEN, HIDDEN, device="cuda", generator=random).to(torch.float8_e4m3fn)
    first = torch.randn(rows, HIDDEN, device="cuda", generator=random).bfloat16()
    x = first.clone()
    data, sf = per_token_cast(x, "e4m3", 128, use_tma_aligned_col_major_sf=True)
    product = skinny_gemm_fp8.operator
    yield lambda: x.copy_(first)
    for k in range(STEPS):
        weight = weights[k], sf_of_weights
        yield lambda: per_token_cast.operator.into((data, sf), x, "e4m3", 128, use_tma_aligned_col_major_sf=True)
        yield lambda weight=weight: product.into((x,), (data, sf), weight, True)  # what the cast has read
        yield lambda: x.clone()


def results(calls, after=lambda: None):
    found = []
    for call in calls:
        out = call()
        after()
        found += [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    return found


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize("chain", [norms_and_casts, mappings_and_expansions, products_of_few_rows])
def test_a_graph_gives_what_one_call_at_a_time_gives(chain, tokens):
    assert config.get_pdl()
    calls = list(chain(tokens))
    kept = [t.clone() for t in results(calls, torch.cuda.synchronize)]  # of buffers the content of the last step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(calls)
    for _ in range(REPLAYS):
        for tensor in got:
            (tensor.view(torch.uint8) if tensor.is_contiguous() else tensor).fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(got, kept, strict=True):
            assert torch.equal(bits(a), bits(b))
