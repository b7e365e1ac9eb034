"""get_block_mapping: vLLM's example, order, numbers of other ranks, sizes, the launches, messages."""

import importlib

import pytest
import torch

from tk_serving.moe import get_block_mapping

CONTRACT = importlib.import_module("tk_serving.moe.get_block_mapping")
OP = get_block_mapping.operator


def lists(result):
    return [part.tolist() for part in result]


def by_definition(ids, num_experts, block_size, expert_map=None):
    """Block by block, in lists."""
    flat = ids.flatten().tolist()
    rows, experts = [], []
    local = range(num_experts) if expert_map is None else expert_map.tolist()
    for e in range(num_experts):
        pairs = [i for i, id in enumerate(flat) if 0 <= id < num_experts and local[id] == e]
        for at in range(0, len(pairs), block_size):
            part = pairs[at : at + block_size]
            rows += part + [len(flat)] * (block_size - len(part))
            experts.append(e)
    used = len(rows)
    most = len(flat) + num_experts * (block_size - 1)
    if len(flat) < num_experts:
        most = min(len(flat) * block_size, most)
    blocks = -(-most // block_size)
    return [rows + [len(flat)] * (most - used), experts + [0] * (blocks - len(experts)), [used]]


def test_example():
    """The example of vLLM's documentation, whose experts count from 1."""
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]])
    rows, experts, used = lists(get_block_mapping(ids, 5, 4))
    assert rows == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12] + [12] * 11
    assert experts == [1, 2, 3, 4, 0, 0, 0]
    assert used == [16]


@pytest.mark.parametrize("implementation", ["reference", "simulator"])
@pytest.mark.parametrize("block_size", [1, 8, 48])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 6), (4, 8), (11, 3), (64, 8)])
def test_against_the_definition(implementation, tokens, topk, block_size):
    ids = torch.randint(-2, 42, (tokens, topk))
    for given in (ids, ids.int()):
        assert lists(OP.call(implementation, given, 40, block_size)) == by_definition(ids, 40, block_size)


@pytest.mark.parametrize("implementation", ["reference", "simulator"])
@pytest.mark.parametrize("tokens", [2, 30])
def test_pairs_of_other_ranks_have_no_row(implementation, tokens):
    """Two ranks of 16 experts, one of which has numbers that no expert can have."""
    ids = torch.randint(-2, 18, (tokens, 6)).int()
    for first in (0, 8):
        local = torch.arange(16).int() - first
        local = torch.where((local >= 0) & (local < 8), local, torch.tensor([-1, 16]).int()[torch.arange(16) % 2])
        expected = by_definition(ids, 16, 4, local)
        assert lists(OP.call(implementation, ids, 16, 4, local)) == expected
    nobody = OP.call(implementation, ids, 16, 4, torch.full((16,), -1, dtype=torch.int32))
    assert nobody[2].tolist() == [0]
    assert set(nobody[0].tolist()) == {6 * tokens}


def test_ids_past_32_bits_have_no_row():
    ids = torch.tensor([[2**32 + 1, 1, -(2**32) + 1]])
    for implementation in ("reference", "simulator"):
        assert lists(OP.call(implementation, ids, 4, 2)) == [[1, 3, 3, 3, 3, 3], [1, 0, 0], [2]]


@pytest.mark.parametrize("pairs", [6, 100])
def test_blocks_divide_the_rows(monkeypatch, pairs):
    """No result depends on how many blocks write the rows, nor on how many rows each has."""
    ids = torch.randint(0, 200, (pairs, 1))
    expected = OP.call("reference", ids, 256, 64)
    divisions = set()
    for at_once, most in ((16, 1024), (1, 1024), (1, 2)):
        monkeypatch.setattr(CONTRACT, "ROWS_PER_THREAD", at_once)
        monkeypatch.setattr(CONTRACT, "MAX_BLOCKS", most)
        *_, part, blocks = CONTRACT._arguments(expected, ids, 256, 64, None)
        assert (blocks - 1) * part < len(expected[0]) <= blocks * part
        assert blocks <= most
        divisions.add(blocks)
        assert lists(OP.call("simulator", ids, 256, 64)) == lists(expected)
    assert len(divisions) == 3


def test_in_order_undoes_what_others_leave_open():
    ids = torch.randint(-1, 9, (30, 3))
    rows, experts, used = OP.call("reference", ids, 8, 4)
    count = torch.bincount(ids[ids >= 0][ids[ids >= 0] < 8], minlength=8)
    start = ((count + 3) // 4 * 4).cumsum(0) - (count + 3) // 4 * 4
    shuffled, other = rows.clone(), experts.clone()
    for e in range(8):
        part = slice(int(start[e]), int(start[e] + count[e]))
        shuffled[part] = rows[part][torch.randperm(int(count[e]))]
    other[int(used) // 4 :] = -1
    assert not torch.equal(shuffled, rows)
    assert lists(CONTRACT.in_order(shuffled, other, used, 4)) == lists((rows, experts, used))
    shuffled[0], shuffled[int(used) - 1] = rows[int(used) - 1], rows[0]
    assert lists(CONTRACT.in_order(shuffled, other, used, 4)) != lists((rows, experts, used))


def test_one_launch_up_to_the_limit():
    for pairs, kernels in ((0, []), (32, ["moe.get_block_mapping:few"]), (512, ["moe.get_block_mapping"])):
        plan = OP.plan(*OP.bind(torch.zeros(pairs, 1, dtype=torch.int32), 256, 8))
        assert [launch.kernel for launch in plan.launches] == kernels


def test_no_tokens():
    ids = torch.empty(0, 6, dtype=torch.int32)
    assert lists(get_block_mapping(ids, 8, 16)) == [[], [], [0]]


def test_into_tensors_of_the_caller():
    ids = torch.tensor([[3, 1]])
    given = torch.empty(8, dtype=torch.int32), torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    OP.into(given, ids, 4, 4)
    assert lists(given) == [[1, 2, 2, 2, 0, 2, 2, 2], [1, 3], [8]]


IDS = torch.zeros(2, 2, dtype=torch.int64)
MAP = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((IDS.short(), 3, 4), TypeError, "topk_idx: expected dtype int64 or int32, got int16"),
        ((IDS[0], 3, 4), ValueError, r"topk_idx: expected shape \[T, K\], got \[2\]"),
        ((IDS[:, :1], 3, 4), ValueError, "topk_idx: expected a contiguous tensor"),
        ((IDS.repeat(129, 1), 3, 4), ValueError, "topk_idx: expected at most 512 pairs, got 516"),
        ((IDS, 1025, 4), ValueError, "num_experts: expected 1 to 1024, got 1025"),
        ((IDS, 3, 0), ValueError, "block_size: expected at least 1, got 0"),
        ((IDS, 3, 2**29), ValueError, "block_size: expected at most 1073741824 rows, got 4 pairs in blocks of"),
        ((IDS, 3, 4, MAP.long()), TypeError, "expert_map: expected dtype int32, got int64"),
        ((IDS, 4, 4, MAP), ValueError, r"expert_map: expected shape \[4\], got \[3\]"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=f"^get_block_mapping: {message}"):
        get_block_mapping(*arguments)
