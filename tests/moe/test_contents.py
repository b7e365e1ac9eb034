"""Contents that are verified with TK_SERVING_CHECK=1 only, and the defined results without it."""

import pytest
import torch

from tk_serving import moe
from tk_serving.config import settings

IDS = torch.tensor([[0, -1], [2, 5]])
POSITIONS = torch.tensor([[0, 4], [5, -1]], dtype=torch.int32)
OWNERS = torch.tensor([0, -1, -1, -1, 1, 1], dtype=torch.int32)
ROWS = torch.zeros(2, 128, dtype=torch.bfloat16)
CODES = ROWS.to(torch.float8_e4m3fn), torch.ones(2, 1)
HALF = POSITIONS[:1], OWNERS
ALL = torch.ones(2, dtype=torch.bool)
MAP = torch.tensor([[0, 9], [1, -1], [2, -1]], dtype=torch.int32)
COUNT = torch.tensor([2, 1, 3], dtype=torch.int32)


def gate(**more):
    return moe.moe_topk_gate(torch.zeros(2, 3), 2, False, 0, 1.0, 0, **more)


def gate_in_groups(**more):
    return moe.top2_sum_gate(torch.zeros(2, 3), torch.zeros(3), 2, 0, 0, False, 0, 1.0, 0, 1, 0, 1, "sigmoid", **more)


CALLS = [
    (lambda: moe.group_count(IDS, 5), "group_count: group_idx: expected indices below 5, got 5"),
    (lambda: moe.aux_fi(IDS, 5, 1), "aux_fi: topk_idx: expected indices below 5, got 5"),
    (lambda: moe.get_fused_mapping(IDS, 5, 0, 1), "get_fused_mapping: topk_idx: expected indices below 5, got 5"),
    (lambda: moe.mask_indices_by_tp(IDS, 4, 2, 0, 2), "mask_indices_by_tp: indices: expected indices below 4, got 5"),
    (
        lambda: moe.inplace_unique_group_indices(IDS.clone(), 5),
        "inplace_unique_group_indices: group_indices: expected indices below 5, got 5",
    ),
    (
        lambda: moe.expand_to_fused(ROWS, POSITIONS, OWNERS[:5]),
        "expand_to_fused: token_topk_to_pos: expected indices below 5, got 5",
    ),
    (
        lambda: moe.expand_to_fused(ROWS, POSITIONS, OWNERS.flip(0)),
        "expand_to_fused: token_topk_to_pos: expected one pair for each row with an expert, got 0 for",
    ),
    (
        lambda: moe.expand_to_fused_with_sf(CODES, 128, POSITIONS.clamp(max=4), OWNERS),
        "expand_to_fused_with_sf: token_topk_to_pos: expected one pair for each row with an expert, got 2 for",
    ),
    (
        lambda: moe.expand_to_fused_and_cast(ROWS, "e4m3", 128, POSITIONS.clamp(min=1), OWNERS),
        "expand_to_fused_and_cast: token_topk_to_pos: expected one pair for each row with an expert, got 0 for",
    ),
    (
        lambda: moe.reduce_fused(ROWS, None, POSITIONS),
        "reduce_fused: token_topk_to_pos: expected indices below 2, got 5",
    ),
    (
        lambda: moe.reduce_fused_add(ROWS, ROWS, None, POSITIONS),
        "reduce_fused_add: token_topk_to_pos: expected indices below 2, got 5",
    ),
    (
        lambda: moe.moe_topk_gate_backward(torch.ones(2, 3), IDS, torch.ones(2, 2), torch.ones(2, 2), 1.0),
        "moe_topk_gate_backward: topk_idx: expected indices below 3, got 5",
    ),
    (
        lambda: gate(fix_routing_mask=ALL, unmapped_topk_idx=IDS.clone()),
        "moe_topk_gate: unmapped_topk_idx: expected indices below 3, got 5",
    ),
    (
        lambda: gate(hash_table=IDS, token_ids=torch.tensor([0, 1])),
        "moe_topk_gate: hash_table: expected indices below 3, got 5",
    ),
    (
        lambda: gate(hash_table=IDS.clamp(max=2), token_ids=torch.tensor([0, 2])),
        "moe_topk_gate: token_ids: expected indices below 2, got 2",
    ),
    (
        lambda: gate_in_groups(to_physical_map=MAP, logical_count=COUNT),
        "top2_sum_gate: logical_count: expected indices below 3, got 3",
    ),
    (
        lambda: gate_in_groups(to_physical_map=MAP, logical_count=COUNT.clamp(max=2)),
        "top2_sum_gate: to_physical_map: expected indices below 4, got 9",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message.split(":")[0] for _, message in CALLS])
def test_invalid_contents(call, message, monkeypatch):
    call()  # defined without the check
    monkeypatch.setattr(settings, "check", True)
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_valid_contents(monkeypatch):
    monkeypatch.setattr(settings, "check", True)
    ids = torch.tensor([[0, 2], [2, -1]])
    owners, _, _, positions, *_ = moe.get_fused_mapping(ids, 3, 0, 4)
    rows = moe.expand_to_fused(ROWS, positions, owners)
    moe.reduce_fused(rows, None, positions)
    gate(fix_routing_mask=ALL, unmapped_topk_idx=ids)
    gate_in_groups(to_physical_map=MAP.clamp(max=3), logical_count=COUNT.clamp(max=2))
