"""top2_sum_gate: groups, ties, weights, shared slots, physical ids, ranks, masks, public faults, messages."""

import math

import numpy as np
import pytest
import torch

from tk_serving.moe import _gating, top2_sum_gate

INF, NAN = float("inf"), float("nan")


def gate(
    logits, bias=None, *, k, groups=0, kept=0, shared=0, factor=1.0, ranks=(0, 1, 0, 1), scoring="sigmoid", **more
):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    bias = torch.zeros(logits.shape[1]) if bias is None else torch.as_tensor(bias, dtype=torch.float32)
    return top2_sum_gate(logits, bias, k, kept, groups, shared > 0, shared, factor, *ranks, scoring, **more)


def test_g03_all_groups_are_equal_and_negative():
    logits = (-(torch.arange(16.0) + 1)).repeat(256, 1)
    ids, weights = gate(logits, k=2, groups=8, kept=4, scoring="softmax")
    assert ids.tolist() == [[0, 1]] * 256
    assert weights.flatten().tolist() == pytest.approx([0.7310586, 0.2689414] * 256, abs=1e-6)


def test_g04_negative_biased_scores():
    logits = (53 * torch.arange(128) % 128) / 32 - 2
    ids, weights = gate(logits[None], [-2.0] * 128, k=6)
    assert ids.tolist() == [[99, 70, 41, 12, 111, 82]]
    assert weights[0].tolist() == pytest.approx([0.168349, 0.167697, 0.167029, 0.166346, 0.165647, 0.164932], abs=1e-6)


def test_g05_one_finite_group():
    logits = torch.full((1, 64), -INF)
    logits[0, 24:32] = torch.arange(8.0)
    ids, weights = gate(logits, k=8, groups=8, kept=1)
    assert ids.tolist() == [[31, 30, 29, 28, 27, 26, 25, 24]]
    assert weights.isfinite().all()


def test_g06_bias_in_float32():
    ids, _ = gate(torch.zeros(1, 8), [1, 1 + 2**-9, 0, 0, 0, 0, 0, 0], k=1)
    assert ids.tolist() == [[1]]


def test_g07_row_stride():
    logits = torch.full((3, 64), 1e30)[:, :60]
    with pytest.raises(ValueError, match=r"top2_sum_gate: logits: expected a contiguous tensor, got strides \[64, 1\]"):
        gate(logits, k=6)


def test_g08_factor_counts_once():
    ids, weights = gate(torch.zeros(2, 256), k=8, groups=8, kept=4, factor=2.5)
    assert ids.tolist() == [list(range(8))] * 2
    assert weights.tolist() == [[0.3125] * 8] * 2


def test_g09_384_experts_in_one_group():
    logits = (101 * torch.arange(384) % 384)[None] / 384.0
    expected = [[19, 38, 57, 76, 95, 114]]
    assert gate(logits, k=6, groups=1, kept=1)[0].tolist() == expected
    assert gate(logits, k=6)[0].tolist() == expected


def test_g12_nan_in_a_masked_row():
    logits = torch.randn(2, 128)
    alone = gate(logits[:1], k=6)
    logits[1] = NAN
    ids, weights = gate(logits, k=6, mask=torch.tensor([True, False]))
    assert torch.equal(ids[:1], alone[0])
    assert torch.equal(weights[:1], alone[1])
    assert ids[1].tolist() == [-1] * 6
    assert weights[1].tolist() == [0.0] * 6


def test_non_finite_logits_have_defined_results():
    logits = torch.tensor([[NAN] * 6, [INF, NAN, -INF, INF, 0, 0]])
    ids, weights = gate(logits, k=3)
    assert ids.tolist() == [[0, 1, 2], [0, 3, 4]]
    assert weights[1].tolist() == pytest.approx([0.4, 0.4, 0.2])
    assert weights[0].tolist() == [0.0] * 3


def test_nan_bias_ranks_lowest():
    assert gate(torch.zeros(1, 4), [NAN, 0, NAN, -5], k=4)[0].tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_scores(scoring):
    row = [-3.0, 0.5, 25.0, 21.0, 20.0, -40.0]
    if scoring == "sigmoid":
        score = [1 / (1 + math.exp(-x)) for x in row]
    elif scoring == "sqrtsoftplus":
        score = [math.sqrt(x if x > 20 else math.log1p(math.exp(x))) for x in row]
    else:
        total = sum(math.exp(x - 25) for x in row)
        score = [math.exp(x - 25) / total for x in row]
    _, weights = gate([row], k=6, scoring=scoring)
    order = sorted(range(6), key=lambda e: -row[e])
    expected = [score[e] / sum(score) for e in order]
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_weights_are_scores_without_bias_added_in_ascending_order():
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(5, 32)).astype(np.float32), rng.normal(size=32).astype(np.float32)
    ids, weights = gate(logits, bias, k=8, factor=2.5)
    scores = (1 / (1 + torch.exp(-torch.from_numpy(logits)))).numpy()
    for row in range(5):
        total = np.float32(1e-20)
        for e in ids[row]:
            total = np.float32(total + scores[row, e])
        assert weights[row].tolist() == [float(scores[row, e] / total * np.float32(2.5)) for e in ids[row]]


def test_groups_count_their_two_largest():
    # Group sums: 0.9 + 0.1, 0.6 + 0.5, 0.8 + 0.2, 0.55 + 0.5; the single largest expert is in a group that loses.
    keys = torch.tensor([[0.9, 0.1, 0.0, 0.6, 0.5, 0.4, 0.8, 0.2, 0.1, 0.55, 0.5, 0.0]])
    ids, _ = gate(torch.full((1, 12), -100.0), keys[0], k=4, groups=4, kept=2)
    assert ids.tolist() == [[3, 9, 4, 10]]


def test_experts_of_other_groups_never_win():
    # The kept group has keys of -inf, the others finite ones.
    bias = [0.0, -INF, -INF, 5.0, -INF, -INF]
    ids, _ = gate(torch.zeros(1, 6), bias, k=3, groups=2, kept=1)
    assert ids.tolist() == [[0, 1, 2]]


def test_group_ties_go_to_the_lower_group():
    assert gate(torch.zeros(1, 16), k=4, groups=4, kept=2)[0].tolist() == [[0, 1, 2, 3]]


def test_shared_slots():
    ids, weights = gate(torch.zeros(1, 8), k=2, shared=2, factor=3.0)
    assert ids.tolist() == [[0, 1, 8, 9]]
    assert weights.tolist() == [[1.5, 1.5, 1.0, 1.0]]


def test_fixed_routing():
    unmapped = torch.tensor([[3, 3], [7, -1], [0, 0]])
    fixed = torch.tensor([True, True, False])
    logits = torch.tensor([[0.0] * 5] * 2 + [[0, 0, 9, 0, 8.0]])
    ids, weights = gate(logits, k=2, fix_routing_mask=fixed, unmapped_topk_idx=unmapped)
    assert ids.tolist() == [[3, 3], [-1, -1], [2, 4]]
    assert weights[:2].tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert unmapped.tolist() == [[3, 3], [7, -1], [2, 4]]


def test_unmapped_receives_logical_ids_in_strided_rows():
    buffer = torch.full((2, 8), 99)
    mask = torch.tensor([True, False])
    to_physical = torch.tensor([[10, 11], [20, 21], [30, 31]], dtype=torch.int32)
    count = torch.tensor([2, 1, 0], dtype=torch.int32)
    ids, weights = gate(
        [[3.0, 2.0, 1.0]] * 2,
        k=3,
        mask=mask,
        to_physical_map=to_physical,
        logical_count=count,
        unmapped_topk_idx=buffer[:, 2:5],
    )
    assert buffer.tolist() == [[99, 99, 0, 1, 2, 99, 99, 99], [99, 99, -1, -1, -1, 99, 99, 99]]
    # 10 and 20 are not among the 3 + 2 - 1 physical experts; expert 2 has no copy. Weights stay.
    assert ids.tolist() == [[-1, -1, -1]] * 2
    assert (weights[0] > 0).all()


def test_physical_copies_rotate_with_the_token():
    to_physical = torch.tensor([[0, 2, 3], [1, -1, -1]], dtype=torch.int32)
    count = torch.tensor([3, 1], dtype=torch.int32)
    ids, _ = gate([[1.0, 0.0]] * 7, k=2, ranks=(1, 4, 0, 1), to_physical_map=to_physical, logical_count=count)
    assert ids[:, 0].tolist() == [[0, 2, 3][(1 + t * 23333) % 3] for t in range(7)]
    assert ids[:, 1].tolist() == [1] * 7


def test_physical_copy_beyond_the_map_or_missing():
    to_physical = torch.tensor([[0, -1], [1, 2]], dtype=torch.int32)
    ids, weights = gate(
        [[1.0, 0.0]] * 4, k=2, to_physical_map=to_physical, logical_count=torch.tensor([2, 9], dtype=torch.int32)
    )
    copies = [t * 23333 % 2 for t in range(4)], [t * 23333 % 9 for t in range(4)]
    assert ids[:, 0].tolist() == [0 if c == 0 else -1 for c in copies[0]]
    assert ids[:, 1].tolist() == [c + 1 if c < 2 else -1 for c in copies[1]]
    assert (weights > 0).all()


def test_physical_product_in_64_bits():
    tokens = 92_040
    to_physical = torch.arange(7, dtype=torch.int32)[None].repeat(1, 1)
    logits = torch.zeros(tokens, 1)
    ids, _ = gate(logits, k=1, to_physical_map=to_physical, logical_count=torch.tensor([7], dtype=torch.int32))
    for t in (0, 92_036, 92_037, 92_038, tokens - 1):
        assert ids[t].item() == t * 23333 % 7


def test_ranks_keep_the_weights():
    logits = torch.arange(16.0).flip(0)[None]
    ids, weights = gate(logits, k=16, ranks=(0, 4, 1, 2))
    local = [-1, -1, -1, -1, 0, 1, 2, 3, -1, -1, -1, -1, 4, 5, 6, 7]
    assert ids[0].tolist() == local
    assert torch.equal(weights, gate(logits, k=16)[1])


def test_empty():
    ids, weights = gate(torch.empty(0, 16), k=2, shared=1)
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((0, 3), torch.int64, (0, 3), torch.float32)


MAP = torch.zeros(8, 2, dtype=torch.int32)
COUNT = torch.ones(8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2, 8).double()}, TypeError, "logits: expected dtype float32 or bfloat16, got float64"),
        ({"logits": torch.zeros(2, 4097)}, ValueError, "logits: expected 1 to 4096 experts, got 4097"),
        ({"bias": torch.zeros(7)}, ValueError, r"bias: expected shape \[8\], got \[7\]"),
        ({"num_topk": 9}, ValueError, "num_topk: expected 1 to 8, got 9"),
        ({"num_topk_groups": 1}, ValueError, "num_topk_groups: expected 0, as num_groups is 0, got 1"),
        ({"num_groups": 3, "num_topk_groups": 1}, ValueError, "num_groups: expected a divisor of the 8 experts, got 3"),
        ({"num_groups": 4}, ValueError, "num_topk_groups: expected 1 to 4, got 0"),
        ({"num_groups": 8, "num_topk_groups": 4}, ValueError, "num_groups: expected groups of 2 to 32 experts, got 8 "),
        ({"num_groups": 4, "num_topk_groups": 1, "num_topk": 3}, ValueError, "num_topk: expected at most 2 experts of"),
        (
            {"use_shared_as_routed": True, "num_shared_experts": 3},
            ValueError,
            "num_shared_experts: expected 1 to 2, got",
        ),
        ({"ep_rank": 2, "num_ep_ranks": 2}, ValueError, "ep_rank: expected 0 to 1, got 2"),
        ({"num_ep_ranks": 9}, ValueError, "num_ep_ranks: expected 1 to 8, got 9"),
        ({"tp_rank": 1}, ValueError, "tp_rank: expected 0 to 0, got 1"),
        ({"scoring_func": "relu"}, ValueError, "scoring_func: expected 'sigmoid' or 'sqrtsoftplus' or 'softmax', got"),
        ({"mask": torch.zeros(2)}, TypeError, "mask: expected dtype bool, got float32"),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, ValueError, r"mask: expected shape \[2\], got \[3\]"),
        (
            {"to_physical_map": MAP},
            ValueError,
            "logical_count: expected a value, as to_physical_map is given, got None",
        ),
        (
            {"to_physical_map": MAP[:7], "logical_count": COUNT},
            ValueError,
            r"to_physical_map: expected shape \[8, Dup\]",
        ),
        (
            {"fix_routing_mask": torch.zeros(2, dtype=torch.bool)},
            ValueError,
            "unmapped_topk_idx: expected the ids that",
        ),
        (
            {"unmapped_topk_idx": torch.zeros(2, 3, dtype=torch.int64)},
            ValueError,
            r"unmapped_topk_idx: expected shape \[2, 2",
        ),
        (
            {"unmapped_topk_idx": torch.zeros(2, 2, dtype=torch.int32)},
            TypeError,
            "unmapped_topk_idx: expected dtype int64",
        ),
        (
            {"unmapped_topk_idx": torch.zeros(2, 2, dtype=torch.int64).t()},
            ValueError,
            "unmapped_topk_idx: expected rows with",
        ),
    ],
)
def test_messages(change, error, message):
    arguments = {
        "logits": torch.zeros(2, 8),
        "bias": torch.zeros(8),
        "num_topk": 2,
        "num_topk_groups": 0,
        "num_groups": 0,
        "use_shared_as_routed": False,
        "num_shared_experts": 0,
        "routed_scaling_factor": 1.0,
        "ep_rank": 0,
        "num_ep_ranks": 1,
        "tp_rank": 0,
        "num_tp_ranks": 1,
        "scoring_func": "sigmoid",
    }
    with pytest.raises(error, match=f"^top2_sum_gate: {message}"):
        top2_sum_gate(**{**arguments, **change})


def test_shared_slots_need_room_in_the_map():
    one_column = torch.zeros(10, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="to_physical_map: expected at least 3 columns, got 2"):
        gate(torch.zeros(1, 8), k=2, shared=2, to_physical_map=one_column, logical_count=one_column[:, 0].contiguous())


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_a_token_does_not_depend_on_the_number_of_tokens(scoring):
    # Few tokens take a block each, many a warp each.
    logits, bias = torch.randn(_gating.MAX_SPREAD_TOKENS + 1, 64), torch.randn(64)
    call = top2_sum_gate.operator.call
    rest = (6, 4, 8, False, 0, 2.5, 0, 1, 0, 1, scoring)
    many, few = (call("simulator", part, bias, *rest) for part in (logits, logits[:20].contiguous()))
    assert all(torch.equal(a[:20], b) for a, b in zip(many, few, strict=True))
