"""Gradients of routing, expansion and reduction against autograd through plain torch."""

import pytest
import torch

from tk_serving.modeling.moe import expand, gate, map_to_experts, reduce, row_weights

SCORES = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
}


def backward(result, inputs, seed=0):
    torch.manual_seed(seed)
    return torch.autograd.grad((result * torch.randn(result.shape).to(result.dtype)).sum(), inputs)


class TestGate:
    @pytest.mark.parametrize("scoring", SCORES)
    @pytest.mark.parametrize("groups", [0, 4])
    def test_gradient(self, scoring, groups):
        torch.manual_seed(0)
        logits = torch.randn(7, 16, requires_grad=True)
        bias = torch.randn(16) * 0.1
        options = {"routed_scaling_factor": 2.5, "scoring_func": scoring, "num_groups": groups}
        ids, weights = gate(logits, 4, bias=bias, num_topk_groups=groups // 2, **options)
        chosen = SCORES[scoring](logits).gather(1, ids)
        expected = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * 2.5
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert not ids.requires_grad
        torch.testing.assert_close(backward(weights, [logits]), backward(expected, [logits]), rtol=1e-4, atol=1e-6)

    def test_ids_by_token(self):
        torch.manual_seed(0)
        logits = torch.randn(5, 8, requires_grad=True)
        table = torch.tensor([[0, 3], [7, 7], [9, 1]])  # a repeated expert, and one that does not exist
        tokens = torch.tensor([0, 1, 2, 0, 1])
        ids, weights = gate(logits, 2, hash_table=table, token_ids=tokens)
        assert ids.tolist() == [[0, 3], [7, 7], [-1, 1], [0, 3], [7, 7]]
        chosen = torch.where(ids >= 0, SCORES["sqrtsoftplus"](logits).gather(1, ids.clamp(min=0)), 0.0)
        expected = chosen / chosen.sum(1, keepdim=True)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(backward(weights, [logits]), backward(expected, [logits]), rtol=1e-4, atol=1e-6)

    def test_scores_that_underflow(self):
        logits = torch.full((1, 4), -200.0, requires_grad=True)
        _, weights = gate(logits, 2)
        (grad,) = backward(weights, [logits])
        assert grad.isfinite().all()

    def test_unused_weights_give_no_gradient(self):
        logits = torch.randn(2, 8, requires_grad=True)
        gate(logits, 2)[1].sum().backward()
        assert logits.grad.abs().max() < 1e-6  # normalised weights have a constant sum


@pytest.fixture
def pairs():
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(5)])
    ids[1, 1], ids[4] = -1, 6  # no expert, and a token without any
    return ids


class TestMapping:
    @pytest.mark.parametrize("alignment", [1, 4])
    def test_expand_and_reduce(self, pairs, alignment):
        mapping = map_to_experts(pairs, 6, alignment)
        x = torch.randn(5, 16, requires_grad=True)
        weights = torch.rand(5, 3, requires_grad=True)
        valid = (pairs >= 0) & (pairs < 6)
        rows = expand(x, mapping)
        back = reduce(rows.sin(), weights, mapping)
        expected = (x.sin()[:, None] * torch.where(valid, weights, 0.0)[..., None]).sum(1)
        torch.testing.assert_close(back, expected)
        torch.testing.assert_close(backward(back, [x, weights]), backward(expected, [x, weights]))

    def test_without_weights(self, pairs):
        mapping = map_to_experts(pairs, 6)
        x = torch.randn(5, 16, requires_grad=True)
        valid = ((pairs >= 0) & (pairs < 6)).sum(1, keepdim=True)
        back = reduce(expand(x, mapping), None, mapping)
        torch.testing.assert_close(back, x * valid)
        torch.testing.assert_close(backward(back, [x]), backward(x * valid, [x]))

    def test_row_weights(self, pairs):
        mapping = map_to_experts(pairs, 6)
        weights = torch.rand(5, 3, requires_grad=True)
        x = torch.randn(5, 16)
        inside = reduce(expand(x, mapping) * row_weights(weights, mapping)[:, None], None, mapping)
        outside = reduce(expand(x, mapping), weights, mapping)
        torch.testing.assert_close(inside, outside)
        torch.testing.assert_close(backward(inside, [weights]), backward(outside, [weights]))

    def test_rows_without_a_pair_do_not_matter(self, pairs):
        """A grouped product leaves them undefined."""
        mapping = map_to_experts(pairs, 6)
        weights = torch.rand(5, 3, requires_grad=True)
        empty = (mapping.pos_to_expert < 0)[:, None]
        assert empty.any()
        rows = torch.randn(15, 16)
        dirty, clean = (torch.where(empty, fill, rows).requires_grad_() for fill in (float("nan"), 0.0))
        results = [reduce(r, weights, mapping) for r in (dirty, clean)]
        assert torch.equal(*results)
        grads = [backward(result, [r, weights]) for result, r in zip(results, (dirty, clean), strict=True)]
        torch.testing.assert_close(*grads)
        assert row_weights(weights, mapping)[empty[:, 0]].eq(0).all()

    def test_long_batches_are_split(self, monkeypatch, pairs):
        from tk_serving.modeling import moe

        mapping = map_to_experts(pairs, 6)
        x, weights = torch.randn(5, 16), torch.rand(5, 3, requires_grad=True)
        whole = backward(reduce(expand(x, mapping), weights, mapping), [weights])
        monkeypatch.setattr(moe, "_DOT_ROWS", 4)
        torch.testing.assert_close(backward(reduce(expand(x, mapping), weights, mapping), [weights]), whole)
