"""engram_gate_fwd: values, signs of zero, masks, in-place, layouts, messages."""

import math

import pytest
import torch

from tk_serving.engram import engram_gate_fwd

EPS = 1e-6
CLAMP = 1e-6


def sigmoid(s):
    return 1 / (1 + math.exp(-s))


def filled(x, k, v, w, *, tokens=1, streams=4, hidden=256, clamp=CLAMP, **options):
    """The gate on constant tensors."""
    arguments = (
        torch.full((tokens, streams, hidden), x, dtype=torch.bfloat16),
        torch.full((tokens, streams, hidden), k, dtype=torch.bfloat16),
        torch.full((tokens, hidden), v, dtype=torch.bfloat16),
        torch.full((streams, hidden), w, dtype=torch.float32),
    )
    return engram_gate_fwd(*arguments, EPS, clamp, **options)


def random(tokens=5, streams=4, hidden=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, streams, hidden, generator=generator).bfloat16()
    kv = torch.randn(tokens, streams + 1, hidden, generator=generator).bfloat16()
    return x, kv[:, :streams], kv[:, streams], torch.randn(streams, hidden, generator=generator)


def test_e01_the_residual_is_added_inside():
    output, dot, gate, rstd_x, rstd_k = filled(1.0, 0.0, 2.0, 1.0, hidden=4096)
    assert output.unique().tolist() == [2.0]
    assert dot.unique().tolist() == [0.0]
    assert gate.flatten().tolist() == pytest.approx([sigmoid(1e-3)] * 4, rel=1e-6)
    assert rstd_x.flatten().tolist() == pytest.approx([1 / math.sqrt(1 + EPS)] * 4, rel=1e-6)
    assert rstd_k.flatten().tolist() == pytest.approx([1e3] * 4, rel=1e-6)


@pytest.mark.parametrize(
    ("k", "w", "clamp", "score", "output"),
    [
        (1.0, 1.0, CLAMP, sigmoid(4), 1.984375),
        (-1.0, 1.0, CLAMP, sigmoid(-4), 1.015625),
        (1.0, 4.0, CLAMP, sigmoid(8), 2.0),
        (1.0, 1.0, 25.0, sigmoid(5), 1.9921875),
        (-1.0, 1.0, 25.0, sigmoid(-5), 1.0078125),
    ],
)
def test_root_of_the_similarity(k, w, clamp, score, output):
    """x . w k = 256 k w over sqrt(256): the similarity is 16 k w."""
    got, dot, gate, *_ = filled(1.0, k, 1.0, w, clamp=clamp)
    assert dot.unique().tolist() == [256 * k * w], "the raw sum is saved"
    assert gate.flatten().tolist() == pytest.approx([score] * 4, rel=1e-5)
    assert got.unique().tolist() == [output]


def test_signs_of_zero():
    """A similarity that underflows keeps its sign: the gate lies on that side of one half."""
    x, k = torch.zeros(2, 1, 256), torch.zeros(2, 1, 256)
    x[:, 0, 0], k[:, 0, 1] = 1e18, 1e18  # tiny reciprocal norms, no part of the dot product
    x[:, 0, 2] = 1.0
    k[:, 0, 2] = torch.tensor([1e-20, -1e-20])
    _, dot, gate, *_ = engram_gate_fwd(
        x.bfloat16(), k.bfloat16(), torch.zeros(2, 256).bfloat16(), torch.ones(1, 256), EPS, CLAMP
    )
    assert dot[0] > 0 > dot[1]
    assert gate.flatten().tolist() == pytest.approx([sigmoid(1e-3), sigmoid(-1e-3)], rel=1e-6)


def test_against_float64():
    x, k, v, w = random()
    output, dot, gate, rstd_x, rstd_k = engram_gate_fwd(x, k, v, w, EPS, CLAMP)
    x64, k64, v64, w64 = x.double(), k.double(), v.double(), w.double()
    expected_dot = torch.einsum("thd,hd,thd->th", x64, w64, k64)
    norm_x, norm_k = (1 / (t.pow(2).mean(-1) + EPS).sqrt() for t in (x64, k64))
    z = expected_dot * norm_x * norm_k / math.sqrt(512)
    expected_gate = torch.sigmoid(z.sign() * z.abs().clamp(min=CLAMP).sqrt())
    for got, expected in ((dot, expected_dot), (gate, expected_gate), (rstd_x, norm_x), (rstd_k, norm_k)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(output.double(), x64 + expected_gate[..., None] * v64[:, None], rtol=2**-8, atol=1e-6)


def test_image_rows_are_the_hidden_states_bit_for_bit():
    x, k, v, w = random()
    x[1, 0, 0] = torch.tensor(0x7FC5, dtype=torch.int16).view(torch.bfloat16)
    k[1] = torch.nan
    mask = torch.tensor([False, True, False, True, False])
    output, *saved = engram_gate_fwd(x, k, v, w, EPS, CLAMP, image_token_mask=mask)
    plain, *plain_saved = engram_gate_fwd(x, k, v, w, EPS, CLAMP)
    assert torch.equal(output[mask].view(torch.int16), x[mask].view(torch.int16))
    assert torch.equal(output[~mask], plain[~mask])
    for got, expected in zip(saved, plain_saved, strict=True):
        assert got[mask].unique().tolist() == [0.0]
        assert torch.equal(got[~mask], expected[~mask])


@pytest.mark.parametrize("masked", [False, True])
def test_inplace(masked):
    x, k, v, w = random()
    options = {"image_token_mask": torch.tensor([True, False, True, False, False])} if masked else {}
    expected, *expected_saved = engram_gate_fwd(x.clone(), k, v, w, EPS, CLAMP, **options)
    output, *saved = engram_gate_fwd(x, k, v, w, EPS, CLAMP, inplace=True, **options)
    assert output is x
    assert torch.equal(x, expected)
    assert all(torch.equal(a, b) for a, b in zip(saved, expected_saved, strict=True))


def test_without_saving():
    x, k, v, w = random()
    output, *saved = engram_gate_fwd(x, k, v, w, EPS, CLAMP, False)
    assert saved == [None] * 4
    assert torch.equal(output, engram_gate_fwd(x, k, v, w, EPS, CLAMP)[0])
    assert engram_gate_fwd(x, k, v, w, EPS, CLAMP, False, inplace=True)[1:] == (None,) * 4


def test_t02_strides_and_alignment_of_k_and_v_do_not_matter():
    x, k, v, w = random()
    spare = torch.zeros(k.numel() + v.numel() + 2).bfloat16()
    k_odd = spare[1 : 1 + k.numel()].view(k.shape).copy_(k)
    v_odd = spare[2 + k.numel() :].view(v.shape).copy_(v)
    swapped = torch.empty(4, 5, 512).bfloat16().transpose(0, 1).copy_(k)
    expected = engram_gate_fwd(x, k.contiguous(), v.contiguous(), w, EPS, CLAMP)
    for other in ((k, v), (k_odd, v_odd), (swapped, v[:1].expand(5, 512).contiguous().copy_(v))):
        assert all(torch.equal(a, b) for a, b in zip(engram_gate_fwd(x, *other, w, EPS, CLAMP), expected, strict=True))


def test_no_tokens():
    output, *saved = filled(1.0, 1.0, 1.0, 1.0, tokens=0)
    assert output.shape == (0, 4, 256)
    assert [s.shape for s in saved] == [(0, 4)] * 4


GOOD = {
    "hidden_states": torch.zeros(3, 2, 256).bfloat16(),
    "k": torch.zeros(3, 2, 256).bfloat16(),
    "v": torch.zeros(3, 256).bfloat16(),
    "weight_fused": torch.zeros(2, 256),
    "eps": EPS,
    "clamp_value": CLAMP,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_states": torch.zeros(3, 2, 256)}, TypeError, "hidden_states: expected dtype bfloat16, got float32"),
        (
            {"hidden_states": torch.zeros(3, 256).bfloat16()},
            ValueError,
            "hidden_states: expected shape [T, h, D], got [3, 256]",
        ),
        (
            {"hidden_states": torch.zeros(3, 2, 384).bfloat16()},
            ValueError,
            "hidden_states: expected a last dimension that is a positive multiple of 256, got 384",
        ),
        ({"k": torch.zeros(3, 1, 256).bfloat16()}, ValueError, "k: expected shape [3, 2, 256], got [3, 1, 256]"),
        (
            {"k": torch.zeros(3, 256, 2).bfloat16().mT},
            ValueError,
            "k: expected stride(-1) == 1, got strides [512, 1, 2]",
        ),
        ({"v": torch.zeros(3, 2, 256).bfloat16()}, ValueError, "v: expected shape [3, 256], got [3, 2, 256]"),
        ({"v": torch.zeros(3, 256).half()}, TypeError, "v: expected dtype bfloat16, got float16"),
        (
            {"weight_fused": torch.zeros(2, 256).bfloat16()},
            TypeError,
            "weight_fused: expected dtype float32, got bfloat16",
        ),
        ({"eps": 0.0}, ValueError, "eps: expected a positive number, got 0.0"),
        ({"clamp_value": -1.0}, ValueError, "clamp_value: expected a positive number, got -1.0"),
        (
            {"image_token_mask": torch.zeros(2).bool()},
            ValueError,
            "image_token_mask: expected shape [3], got [2]",
        ),
    ],
)
def test_messages(change, error, message):
    with pytest.raises(error) as raised:
        engram_gate_fwd(**(GOOD | change))
    assert str(raised.value) == f"engram_gate_fwd: {message}"
