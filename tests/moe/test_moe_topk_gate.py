"""moe_topk_gate: biases, hash routing, forced randomness, preallocated results, the tree sum, messages."""

import math

import numpy as np
import pytest
import torch

from tk_serving import moe, reference
from tk_serving.moe import moe_topk_gate
from tk_serving.operator import find

INF, NAN = float("inf"), float("nan")


def gate(logits, *, k, shared=0, factor=1.0, ep_rank=0, **more):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return moe_topk_gate(logits, k, shared > 0, shared, factor, ep_rank, **more)


def test_alias():
    assert moe.moe_topk_gate_forward is moe_topk_gate
    assert find("moe.moe_topk_gate_forward") is find("moe_topk_gate")
    ids, _ = reference.moe_topk_gate_forward(torch.tensor([[0.0, 1.0]]), 1, False, 0, 1.0, 0)
    assert ids.tolist() == [[1]]


def test_default_scores_are_sqrtsoftplus():
    row = [-3.0, 0.5, 25.0, 21.0, 20.0, -40.0]
    score = [math.sqrt(x if x > 20 else math.log1p(math.exp(x))) for x in row]
    ids, weights = gate([row], k=6, factor=1.5)
    assert ids.tolist() == [[2, 3, 4, 1, 0, 5]]
    assert weights[0].tolist() == pytest.approx([1.5 * score[e] / sum(score) for e in ids[0]], rel=1e-6, abs=1e-12)


def test_weight_sum_is_a_tree_over_32_lanes():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(20, 64)).astype(np.float32)
    scores = torch.empty(20, 64)
    ids, weights = gate(logits, k=6, factor=1.5, scores=scores)
    for row in range(20):
        lanes = np.zeros(32, np.float32)
        lanes[:6] = scores[row, ids[row]].numpy()
        chosen = lanes[:6].copy()
        for distance in (16, 8, 4, 2, 1):
            lanes = lanes + lanes[np.arange(32) ^ distance]
        expected = chosen / (lanes[0] + np.float32(1e-20)) * np.float32(1.5)
        assert weights[row].tolist() == expected.tolist()


def test_biases():
    logits = torch.zeros(2, 4)
    bias, image_bias = torch.tensor([0.0, 1, 0, 0]), torch.tensor([0.0, 0, 0, 1])
    image = torch.tensor([False, True])
    ids, weights = gate(logits, k=2, bias=bias, image_bias=image_bias, image_token_mask=image)
    assert ids.tolist() == [[1, 0], [3, 0]]
    assert weights.tolist() == [[0.5, 0.5]] * 2
    assert gate(logits, k=2, image_bias=image_bias, image_token_mask=image)[0].tolist() == [[0, 1], [3, 0]]
    assert gate(logits, k=2)[0].tolist() == [[0, 1]] * 2


def test_softmax_ranks_by_logit_plus_bias():
    ids, _ = gate([[0.0, 1.0]], k=1, bias=torch.tensor([1.5, 0.0]), scoring_func="softmax")
    assert ids.tolist() == [[0]]


def test_scores_are_zero_on_masked_rows():
    scores = torch.full((2, 3), NAN)
    mask = torch.tensor([False, True])
    ids, weights = gate([[1.0, 2.0, NAN]] * 2, k=2, scoring_func="sigmoid", mask=mask, scores=scores)
    assert scores[0].tolist() == [0.0] * 3
    assert scores[1].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2)), 0.0])
    assert (ids.tolist(), weights[0].tolist()) == ([[-1, -1], [1, 0]], [0.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_table(dtype):
    table = torch.tensor([[3, 1], [0, 0], [5, -1]], dtype=dtype)
    token_ids = torch.tensor([2, 0, 1, -1, 3], dtype=dtype)
    unmapped = torch.full((5, 2), 9)
    ids, weights = gate(torch.zeros(5, 4), k=2, hash_table=table, token_ids=token_ids, unmapped_topk_idx=unmapped)
    assert ids.tolist() == unmapped.tolist() == [[-1, -1], [3, 1], [0, 0], [-1, -1], [-1, -1]]
    assert weights.tolist() == [[0.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]


def test_hash_table_equals_fixed_routing():
    table = torch.stack([torch.randperm(16)[:6] for _ in range(50)])
    token_ids = torch.randint(0, 50, (9,))
    logits = torch.randn(9, 16)
    fixed = gate(logits, k=6, fix_routing_mask=torch.ones(9, dtype=torch.bool), unmapped_topk_idx=table[token_ids])
    hashed = gate(logits, k=6, hash_table=table, token_ids=token_ids)
    assert all(torch.equal(a, b) for a, b in zip(fixed, hashed, strict=True))


def test_fixed_ids_out_of_range():
    unmapped = torch.tensor([[3, 3], [7, 1]])
    ids, weights = gate(
        torch.zeros(2, 5), k=2, fix_routing_mask=torch.ones(2, dtype=torch.bool), unmapped_topk_idx=unmapped
    )
    assert ids.tolist() == [[3, 3], [-1, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.0, 1.0]]
    assert unmapped.tolist() == [[3, 3], [7, 1]]


def random_gate(ep_rank, mask=None):
    tokens = 200
    force = torch.ones(tokens, dtype=torch.bool)
    unmapped, scores = torch.zeros(tokens, 6, dtype=torch.int64), torch.ones(tokens, 64)
    to_physical, count = torch.zeros(65, 5, dtype=torch.int32), torch.ones(65, dtype=torch.int32)
    result = gate(
        torch.randn(tokens, 64),
        k=6,
        shared=1,
        ep_rank=ep_rank,
        mask=mask,
        force_random=force,
        to_physical_map=to_physical,
        logical_count=count,
        unmapped_topk_idx=unmapped,
        scores=scores,
    )
    return *result, unmapped, scores


def test_forced_randomness():
    ids, weights, unmapped, scores = random_gate(3)
    assert all(len(set(row)) == 7 for row in ids.tolist())
    assert set(ids.flatten().tolist()) == set(range(64 + 5 - 1))
    assert weights.min() >= 0
    assert weights.max() < 1
    assert weights.unique().numel() > 1300
    assert unmapped.unique().tolist() == [-1]
    assert scores.unique().tolist() == [0.0]
    again = random_gate(3)
    assert torch.equal(ids, again[0])
    assert torch.equal(weights, again[1])
    assert not torch.equal(ids, random_gate(4)[0])


def test_mask_is_above_randomness():
    mask = torch.zeros(200, dtype=torch.bool)
    mask[:5] = True
    ids, weights, _, _ = random_gate(3, mask)
    assert ids[5:].unique().tolist() == [-1]
    assert weights[5:].unique().tolist() == [0.0]
    assert torch.equal(ids[:5], random_gate(3)[0][:5])


def test_preallocated_results():
    out = torch.empty(2, 3, dtype=torch.int64), torch.empty(2, 3)
    ids, weights = gate(torch.zeros(2, 4), k=2, shared=1, out=out)
    assert ids is out[0]
    assert weights is out[1]
    assert ids.tolist() == [[0, 1, 4]] * 2
    assert weights.tolist() == [[0.5, 0.5, 1.0]] * 2


def test_empty():
    ids, weights = gate(torch.empty(0, 16), k=2, shared=1)
    assert (ids.shape, weights.shape) == ((0, 3), (0, 3))


def flags(n):
    return torch.zeros(n, dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"image_bias": torch.zeros(8)},
            ValueError,
            "image_token_mask: expected a value, as image_bias is given, got None",
        ),
        ({"hash_table": torch.zeros(5, 2).long()}, ValueError, "token_ids: expected a value, as hash_table is given"),
        (
            {"hash_table": torch.zeros(5, 3).long(), "token_ids": torch.zeros(2).long()},
            ValueError,
            r"hash_table: expected shape \[V, 2\], got \[5, 3\]",
        ),
        (
            {"hash_table": torch.zeros(5, 2), "token_ids": torch.zeros(2).long()},
            TypeError,
            "hash_table: expected dtype int64 or int32, got float32",
        ),
        (
            {
                "hash_table": torch.zeros(5, 2).long(),
                "token_ids": torch.zeros(2).long(),
                "fix_routing_mask": flags(2),
                "unmapped_topk_idx": torch.zeros(2, 2).long(),
            },
            ValueError,
            "fix_routing_mask: expected None, as hash_table gives the ids",
        ),
        ({"out": (torch.zeros(2, 2), torch.zeros(2, 2))}, TypeError, r"out\[0\]: expected dtype int64, got float32"),
        ({"out": (torch.zeros(2, 3).long(), torch.zeros(2, 3))}, ValueError, r"out\[0\]: expected shape \[2, 2\]"),
        ({"out": torch.zeros(2, 2)}, TypeError, r"out: expected a \(data, sf\) pair of tensors, got Tensor"),
        ({"scores": torch.zeros(2, 7)}, ValueError, r"scores: expected shape \[2, 8\], got \[2, 7\]"),
        ({"force_random": flags(3)}, ValueError, r"force_random: expected shape \[2\], got \[3\]"),
        ({"ep_rank": -1}, ValueError, "ep_rank: expected at least 0, got -1"),
    ],
)
def test_messages(change, error, message):
    arguments = {"num_topk": 2, "use_shared_as_routed": False, "num_shared_experts": 0}
    arguments |= {"routed_scaling_factor": 1.0, "ep_rank": 0, **change}
    with pytest.raises(error, match=f"^moe_topk_gate: {message}"):
        moe_topk_gate(torch.zeros(2, 8), **arguments)
