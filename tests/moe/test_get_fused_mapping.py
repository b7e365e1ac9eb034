"""get_fused_mapping: the example of the specification, order, capacity, sync and no-sync forms, messages."""

import importlib

import pytest
import torch

from tk_serving.moe import _counting, get_fused_mapping
from tk_serving.operator import find

CONTRACT = importlib.import_module("tk_serving.moe.get_fused_mapping")


def lists(result):
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in result]


EXAMPLE = torch.tensor([[0, 2], [2, -1], [2, 0]])
POSITIONS = [[0, 0, -1, -1, 2, 2, 2, -1], [0, 2, -1, -1, 0, 1, 2, -1], [0, 5, -1, -1, 1, 2, 4, -1]]
REST = [[[0, 4], [5, -1], [6, 1]], [0, 4, 4], [4, 4, 8], [4, 0, 4]]


def test_example():
    assert lists(get_fused_mapping(EXAMPLE, 3, 0, 4)) == [*POSITIONS, *REST, [4, 0, 4]]


def test_example_without_sync():
    bound = [[*part, -1, -1, -1, -1] for part in POSITIONS]
    assert lists(get_fused_mapping(EXAMPLE, 3, 0, 4, True)) == [*bound, *REST, []]
    assert lists(get_fused_mapping(EXAMPLE, 3, 9, 4)) == [*([*part, -1] for part in POSITIONS), *REST, []]


def test_capacity_drops_pairs():
    result = lists(get_fused_mapping(EXAMPLE, 3, 6, 4))
    assert result[:3] == [part[:6] for part in POSITIONS]
    assert result[3] == [[0, 4], [5, -1], [-1, 1]]
    assert result[4:7] == REST[1:]


def test_m01_negative_id():
    result = lists(get_fused_mapping(torch.tensor([[0, -1]]), 4, 4, 4))
    assert result[0] == [0, -1, -1, -1]
    assert result[3:7] == [[[0, -1]], [0, 4, 4, 4], [4, 4, 4, 4], [4, 0, 0, 0]]


def test_ids_past_the_experts_have_no_position():
    result = lists(get_fused_mapping(torch.tensor([[3, 1], [2**32, 1]]), 3, 0, 1))
    assert result == [[1, 1], [0, 1], [1, 3], [[-1, 0], [-1, 1]], [0, 0, 2], [0, 2, 2], [0, 2, 0], [0, 2, 0]]


def test_m05_range_beyond_the_last_expert():
    """Ids of 16 experts from 250 on, of 256: the last ten have no position, and nothing is written for them."""
    ids = torch.arange(250, 266)[:, None]
    for implementation in ("reference", "simulator"):
        result = get_fused_mapping.operator.call(implementation, ids, 256, 6, 1)
        assert result[3].flatten().tolist() == [0, 1, 2, 3, 4, 5] + [-1] * 10
        assert result[0].tolist() == list(range(250, 256))


@pytest.mark.parametrize("tokens", [5, 800])
def test_narrow_ids(tokens):
    ids = torch.randint(-2, 42, (tokens, 6))
    for wide, narrow in zip(get_fused_mapping(ids, 40, 0, 4), get_fused_mapping(ids.int(), 40, 0, 4), strict=True):
        assert wide == narrow if isinstance(wide, list) else torch.equal(wide, narrow)


def test_m02_too_many_experts():
    with pytest.raises(ValueError, match="get_fused_mapping: num_experts: expected 1 to 1024, got 1025"):
        get_fused_mapping(torch.tensor([[1024]]), 1025, 0, 1)


def test_m04_regions_agree_with_their_total():
    sizes = [2, 3, 0, 6, 8]
    ids = torch.tensor([e for e, n in enumerate(sizes) for _ in range(n)])[torch.randperm(19)][:, None]
    trimmed = get_fused_mapping(ids, 5, 0, 4)
    assert (len(trimmed[0]), sum(trimmed[7])) == (24, 24)
    owners = get_fused_mapping(ids, 5, 32, 4)[0][::4]
    assert owners.tolist() == [0, 1, 3, 3, 4, 4, -1, -1]


@pytest.mark.parametrize("alignment", [1, 16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 127, 129, 700])
def test_against_the_definition(tokens, alignment):
    ids = torch.randint(-2, 42, (tokens, 6))
    result = get_fused_mapping(ids, 40, 0, alignment)
    expected, position = [], [-1] * (tokens * 6)
    starts, ends = [], []
    for e in range(40):
        starts.append(len(expected))
        for pair in (ids.flatten() == e).nonzero()[:, 0].tolist():
            position[pair] = len(expected)
            expected.append((e, pair // 6, pair))
        expected += [(-1, -1, -1)] * (-len(expected) % alignment)
        ends.append(len(expected))
    assert [list(row) for row in zip(*lists(result[:3]), strict=True)] == [list(row) for row in expected]
    assert result[3].flatten().tolist() == position
    assert lists(result[4:6]) == [starts, ends]
    assert result[7] == result[6].tolist() == [b - a for a, b in zip(starts, ends, strict=True)]


def test_no_tokens():
    ids = torch.empty(0, 2, dtype=torch.int64)
    assert lists(get_fused_mapping(ids, 2, 3, 4)) == [*[[-1, -1, -1]] * 3, [], *[[0, 0]] * 3, []]
    assert lists(get_fused_mapping(ids, 2, 0, 4)) == [[], [], [], [], *[[0, 0]] * 3, [0, 0]]
    assert lists(get_fused_mapping(ids, 2, 0, 1, True)) == [[], [], [], [], *[[0, 0]] * 3, []]
    kernel = find("get_fused_mapping").call("simulator", ids, 2, 3, 4)
    assert lists(kernel) == [*[[-1, -1, -1]] * 3, [], *[[0, 0]] * 3, []]


def test_capture_needs_the_form_without_sync(monkeypatch):
    get_fused_mapping(EXAMPLE, 3, 0, 4)  # outside of a capture, which is no reason to allow it in one
    monkeypatch.setattr(CONTRACT, "_capturing", lambda tensor: True)
    with pytest.raises(
        RuntimeError, match="get_fused_mapping: force_no_sync: expected True, or num_expanded_tokens > 0"
    ):
        get_fused_mapping(EXAMPLE, 3, 0, 4)
    get_fused_mapping(EXAMPLE, 3, 0, 4, True)
    get_fused_mapping(EXAMPLE, 3, 9, 4)


def test_no_result_depends_on_the_launch(monkeypatch):
    """One launch and two, and any number of blocks, place the pairs alike."""
    op = find("get_fused_mapping")
    ids = torch.randint(-1, 9, (500, 3))
    expected = lists(op.call("reference", ids, 8, 2000, 16))
    assert lists(op.call("simulator", ids, 8, 2000, 16)) == expected
    monkeypatch.setattr(CONTRACT, "MAX_PAIRS_IN_ONE_LAUNCH", 1000)
    assert lists(op.call("simulator", ids, 8, 2000, 16)) == expected
    monkeypatch.setattr(CONTRACT, "_division", lambda pairs: (1, -(-pairs // 512), 512))
    assert lists(op.call("simulator", ids, 8, 2000, 16)) == expected


@pytest.mark.parametrize("pairs", [4097, 65_536, 300_000 * 8, 2**31 - 2**21])
def test_blocks_cover_the_pairs(pairs):
    blocks, chunk = _counting.blocks_of(pairs)
    assert chunk % _counting.CHUNK == 0
    assert (blocks - 1) * chunk < pairs <= blocks * chunk
    assert blocks <= 128


@pytest.mark.parametrize("pairs", [4097, 65_536, 300_000 * 8, CONTRACT.MAX_ROWS])
def test_chunks_cover_the_pairs(pairs):
    sections, chunks, chunk = CONTRACT._division(pairs)
    assert chunk % CONTRACT.CHUNK == 0
    assert (chunks - 1) * chunk < pairs <= chunks * chunk < 2**31
    assert (sections - 1) * CONTRACT.SECTION < chunks <= sections * CONTRACT.SECTION
    assert sections <= CONTRACT.MAX_SECTIONS


IDS = torch.zeros(2, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((IDS.short(), 3, 0, 4), TypeError, "topk_idx: expected dtype int64 or int32, got int16"),
        ((IDS[0], 3, 0, 4), ValueError, r"topk_idx: expected shape \[T, K\], got \[2\]"),
        ((IDS[:, :1], 3, 0, 4), ValueError, "topk_idx: expected a contiguous tensor"),
        ((IDS, 0, 0, 4), ValueError, "num_experts: expected 1 to 1024, got 0"),
        ((IDS, 3, -1, 4), ValueError, "num_expanded_tokens: expected 0 to"),
        ((IDS, 3, 0, 0), ValueError, "alignment: expected at least 1, got 0"),
        ((IDS, 3, 0, 2**30), ValueError, "topk_idx: expected at most 2146435072 rows, got 4 pairs at alignment"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=f"^get_fused_mapping: {message}"):
        get_fused_mapping(*arguments)


@pytest.mark.parametrize(
    ("pairs", "experts", "alignment", "rows"), [(8, 256, 128, 1024), (512, 256, 128, 33024), (0, 8, 4, 0)]
)
def test_capacity(pairs, experts, alignment, rows):
    assert CONTRACT.capacity(pairs, experts, alignment) == rows


def test_capacity_holds_every_choice():
    for pairs in range(1, 9):
        rows = CONTRACT.capacity(pairs, 4, 3)
        for ids in (torch.arange(pairs)[:, None] % 4, torch.zeros(pairs, 1, dtype=torch.int64)):
            assert (get_fused_mapping(ids, 4, rows, 3)[3] >= 0).all()
