"""Rows past 2^31 elements: few are live, and only these are written and compared."""

import pytest
import torch
from on_device import bits, needs_device

from tk_serving import dispatch
from tk_serving.operator import find
from tk_serving.workloads import Maker

pytestmark = [*needs_device(), pytest.mark.large]

HIDDEN, TOPK, LIVE = 7168, 8, 8  # the first and the last tokens are live


def call(name, *args):
    return find(name).call(dispatch.KERNEL, *args)


def ends(count):
    """Indices of the live tokens of ``count``."""
    return torch.cat((torch.arange(LIVE), torch.arange(count - LIVE, count))).cuda()


def mapping(tokens):
    """int32 [tokens, TOPK]: pair p of a live token at position p, all others without; and an owner for each row."""
    positions = torch.full((tokens, TOPK), -1, dtype=torch.int32, device="cuda")
    live = ends(tokens)
    positions[live] = torch.arange(tokens * TOPK, dtype=torch.int32, device="cuda").view(tokens, TOPK)[live]
    return positions, torch.zeros(tokens * TOPK, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.bfloat16, HIDDEN), (torch.float32, HIDDEN + 1)])
def test_l04_expand(dtype, hidden):
    """Row 299594 of 299600 starts past 2^31 elements."""
    tokens = 37450
    positions, owners = mapping(tokens)
    x = torch.randn(tokens, hidden, dtype=dtype, device="cuda")
    rows = call("expand_to_fused", x, positions, owners)
    live = ends(tokens)
    assert torch.equal(bits(rows[positions[live].long()]), bits(x[live][:, None].expand(-1, TOPK, -1)))


@pytest.mark.parametrize("name", ["reduce_fused", "reduce_fused_add"])
def test_l05_backward_of_expand_is_reduce(name):
    """304000 rows; each live token adds up its own."""
    tokens = 38000
    positions, _ = mapping(tokens)
    live = ends(tokens)
    rows = torch.empty(tokens * TOPK, HIDDEN, dtype=torch.bfloat16, device="cuda")
    own = torch.randn(len(live), TOPK, HIDDEN, device="cuda").to(torch.bfloat16)
    rows[positions[live].long()] = own
    alone = torch.arange(len(live) * TOPK, dtype=torch.int32, device="cuda").view(-1, TOPK)
    shared = [torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")] * (name == "reduce_fused_add")
    total = call(name, rows, *shared, None, positions)
    expected = call(name, own.flatten(0, 1), *(s[live] for s in shared), None, alone)
    assert torch.equal(bits(total[live]), bits(expected))


@pytest.mark.parametrize("zero_padding", [True, False])
@pytest.mark.parametrize("name", ["expand_to_fused_with_sf", "expand_to_fused_and_cast"])
def test_l06_padded_rows_with_scales(name, zero_padding):
    """524288 rows: data row 299594 wraps; the last rows and their column-major scales are those of the tokens alone."""
    rows, tokens = 524288, 300  # more tokens than scatter their scales themselves
    positions = torch.full((tokens, TOPK), -1, dtype=torch.int32, device="cuda")
    live = ends(tokens)
    places = torch.cat((torch.arange(LIVE * TOPK), torch.arange(rows - LIVE * TOPK, rows))).int().cuda()
    positions[live] = places.view(-1, TOPK)
    owners = torch.zeros(rows, dtype=torch.int32, device="cuda")
    owners[LIVE * TOPK : -LIVE * TOPK] = -1
    x = Maker("cuda").randn(tokens, HIDDEN, dtype=torch.bfloat16)
    cast = find("per_token_cast").call("reference", x, "e4m3", 128)
    given = (x, "e4m3", 128) if name.endswith("cast") else (cast, 128)
    flags = (True, False, False) if name.endswith("cast") else (True,)
    data, sf = call(name, *given, positions, owners, *flags, zero_padding)
    at = places.long().view(-1, TOPK)
    assert torch.equal(bits(data[at]), bits(cast[0][live][:, None].expand(-1, TOPK, -1)))
    assert torch.equal(bits(sf[at]), bits(cast[1][live][:, None].expand(-1, TOPK, -1)))
    assert sf.stride() == (1, rows)
    assert float(sf[LIVE * TOPK : -LIVE * TOPK].abs().max()) == 0.0
    if zero_padding:
        assert int(data.view(torch.uint8)[LIVE * TOPK : -LIVE * TOPK].max()) == 0


def test_l06_scales_with_a_column_past_2_31_elements():
    """Column 32 of the scales starts at 2^31."""
    sf = torch.empty(32 * 2**26 + 4, device="cuda").as_strided((4, 33), (1, 2**26))
    values = torch.arange(1.0, 133.0, device="cuda").view(4, 33)
    sf.copy_(values)
    data = torch.zeros(4, 33 * 128, dtype=torch.int8, device="cuda").view(torch.float8_e4m3fn)
    positions = torch.arange(4, dtype=torch.int32, device="cuda")[:, None]
    owners = torch.zeros(4, dtype=torch.int32, device="cuda")
    assert torch.equal(call("expand_to_fused_with_sf", (data, sf), 128, positions, owners, True)[1], values)


@pytest.mark.parametrize(("stride", "tokens"), [(2**31, 2), (2**30, 4)])
def test_rows_with_a_stride_past_2_31_elements(stride, tokens):
    """The input of the cast may be strided: a 32-bit product of row and stride is negative or wraps."""
    x = torch.empty(stride * (tokens - 1) + HIDDEN, dtype=torch.bfloat16, device="cuda")
    x = x.as_strided((tokens, HIDDEN), (stride, 1))
    x.copy_(torch.randn(tokens, HIDDEN))
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda")[:, None]
    owners = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    data, sf = call("expand_to_fused_and_cast", x, "e4m3", 128, positions, owners)
    expected, scales = call("expand_to_fused_and_cast", x.clone(), "e4m3", 128, positions, owners)
    assert torch.equal(bits(data), bits(expected))
    assert torch.equal(sf, scales)


def test_gates_past_2_31_logits():
    """The last tokens of 8388624 choose what they choose alone."""
    tokens, experts = 8388624, 256
    logits = torch.zeros(tokens, experts, device="cuda")
    logits[-16:] = torch.randn(16, experts, device="cuda")
    bias = torch.zeros(experts, device="cuda")

    def gate(rows):
        ranks = (0, 1, 0, 1)
        return call("top2_sum_gate", rows, bias, 8, 4, 8, False, 0, 2.5, *ranks, "sigmoid")

    ids, weights = gate(logits)
    alone, expected = gate(logits[-16:].clone())
    assert torch.equal(ids[-16:], alone)
    assert torch.equal(bits(weights[-16:]), bits(expected))
    assert ids[0].tolist() == list(range(8))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_mapping_of_300000_tokens(dtype):
    ids = Maker("cuda").topk_ids(300_000, 256, TOPK).to(dtype)
    arguments = (ids, 256, 300_000 * TOPK + 256 * 127, 128)
    expected = find("get_fused_mapping").call(dispatch.REFERENCE, *arguments)
    for got, want in zip(call("get_fused_mapping", *arguments)[:7], expected[:7], strict=True):
        assert torch.equal(got, want)
