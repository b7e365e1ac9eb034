"""moe_topk_gate_backward: against automatic differentiation of the formulas in float64; limits; messages."""

import pytest
import torch

from tk_serving.moe import moe_topk_gate, moe_topk_gate_backward


def scores_of(x, scoring):
    if scoring == "sigmoid":
        return x.sigmoid()
    if scoring == "softmax":
        return x.softmax(1)
    return torch.nn.functional.softplus(x).sqrt()


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("with_sum", [False, True])
def test_against_automatic_differentiation(scoring, with_sum):
    torch.manual_seed(0)
    tokens, experts, k, factor = 12, 20, 4, 1.5
    logits = torch.randn(tokens, experts)
    grad = torch.randn(tokens, k)
    scores = torch.empty(tokens, experts)
    ids, weights = moe_topk_gate(logits, k, False, 0, factor, 0, scoring, scores=scores)
    mask = torch.rand(tokens) < 0.7 if with_sum else None
    sums = torch.randn(3, experts) if with_sum else None

    x = logits.double().requires_grad_()
    u = scores_of(x, scoring)
    chosen = u.gather(1, ids)
    loss = (chosen / chosen.sum(1, keepdim=True) * factor * grad).sum()
    if with_sum:
        share = (u / u.sum(1, keepdim=True) * mask[:, None]).view(3, 4, experts).sum(1)
        loss = loss + (share * sums).sum()
    loss.backward()
    result = moe_topk_gate_backward(scores, ids, weights, grad, factor, scoring, mask, sums)
    torch.testing.assert_close(result.double(), x.grad, rtol=2e-5, atol=2e-6)


def test_missing_and_repeated_ids():
    scores = torch.tensor([[0.5, 1.0, 0.25]])
    ids = torch.tensor([[1, 1, -1, 3]])
    weights = torch.tensor([[0.5, 0.5, 7.0, 7.0]])
    grad = torch.tensor([[1.0, 3.0, 9.0, 9.0]])
    # D = 2, sum of g w = 2: ((1 - 2) + (3 - 2)) / 2 = 0.
    assert moe_topk_gate_backward(scores, ids, weights, grad, 1.0).tolist() == [[0.0] * 3]
    grad[0, 1] = 5.0
    # Sum of g w = 3: ((2 - 3) + (10 - 3)) / 2 = 3 with factor 2, times (1 - e^-1) / 2.
    result = moe_topk_gate_backward(scores, ids, weights, grad, 2.0)
    assert result[0].tolist() == pytest.approx([0.0, 3 * (1 - 2.718281828**-1) / 2, 0.0])


def test_zero_score_has_no_gradient():
    scores = torch.zeros(1, 3)
    result = moe_topk_gate_backward(scores, torch.tensor([[0]]), torch.zeros(1, 1), torch.ones(1, 1), 1.0)
    assert result.tolist() == [[0.0] * 3]


def test_small_scores_keep_their_digits():
    scores = torch.tensor([[1e-4, 1.0]])
    result = moe_topk_gate_backward(scores, torch.tensor([[0]]), torch.zeros(1, 1), torch.ones(1, 1), 1e-4)
    assert result[0, 0].item() == pytest.approx(0.5e-4, rel=1e-5)


def test_preallocated_and_empty():
    out = torch.empty(2, 3)
    ids, k = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    assert moe_topk_gate_backward(torch.rand(2, 3), ids, k, k, 1.0, out=out) is out
    assert moe_topk_gate_backward(torch.rand(0, 3), ids[:0], k[:0], k[:0], 1.0).shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": torch.zeros(2, 3).half()}, TypeError, "scores: expected dtype float32, got float16"),
        ({"topk_idx": torch.zeros(2, 1)}, TypeError, "topk_idx: expected dtype int64, got float32"),
        ({"topk_weights": torch.zeros(2, 2)}, ValueError, r"topk_weights: expected shape \[2, 1\], got \[2, 2\]"),
        (
            {"grad_scores_sum": torch.zeros(1, 3)},
            ValueError,
            "mask: expected a mask, as grad_scores_sum is given, got None",
        ),
        (
            {"grad_scores_sum": torch.zeros(3, 3), "mask": torch.zeros(2, dtype=torch.bool)},
            ValueError,
            "grad_scores_sum: expected a number of sequences that divides the 2 tokens, got 3",
        ),
        ({"scoring_func": "relu"}, ValueError, "scoring_func: expected 'sigmoid' or"),
        ({"out": torch.zeros(3, 3)}, ValueError, r"out: expected shape \[2, 3\], got \[3, 3\]"),
    ],
)
def test_messages(change, error, message):
    arguments = {
        "scores": torch.zeros(2, 3),
        "topk_idx": torch.zeros(2, 1, dtype=torch.int64),
        "topk_weights": torch.zeros(2, 1),
        "grad_topk_weights": torch.zeros(2, 1),
        "routed_scaling_factor": 1.0,
    }
    with pytest.raises(error, match=f"^moe_topk_gate_backward: {message}"):
        moe_topk_gate_backward(**{**arguments, **change})
