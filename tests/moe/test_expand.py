"""expand_to_fused, expand_to_fused_with_sf: rows, padding, scale layouts, offsets past 2^31, messages."""

import pytest
import torch
from harness import poisoned_outputs

from tk_serving.moe import expand_to_fused, expand_to_fused_with_sf, get_fused_mapping, reduce_fused
from tk_serving.operator import find
from tk_serving.workloads import Maker

POSITIONS = torch.tensor([[0, 4], [5, -1]], dtype=torch.int32)
OWNERS = torch.tensor([0, -1, -1, -1, 1, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int16], ids=str
)
@pytest.mark.parametrize("hidden", [1, 7, 100, 128])
def test_rows_are_copied_as_bytes(dtype, hidden):
    raw = torch.randint(0, 256, (2, hidden * dtype.itemsize), dtype=torch.uint8)
    out = expand_to_fused(raw.view(dtype), POSITIONS, OWNERS)
    assert (out.shape, out.dtype) == ((6, hidden), dtype)
    zero = [0] * (hidden * dtype.itemsize)
    a, b = raw.tolist()
    assert out.view(torch.uint8).tolist() == [a, zero, zero, zero, a, b]


def test_m03_dropped_slots():
    ids = torch.tensor([[2, -1, 0], [-1, -1, 1]])
    x = torch.randn(2, 256).to(torch.bfloat16)
    owners, _, _, positions, *_ = get_fused_mapping(ids, 3, 0, 4)
    rows = expand_to_fused(x, positions, owners)
    assert rows[owners < 0].unique().tolist() == [0.0]
    total = reduce_fused(rows, torch.ones(2, 3), positions)
    assert torch.equal(total, torch.stack([2 * x[0], x[1]]))


@pytest.mark.parametrize("name", ["expand_to_fused", "expand_to_fused_with_sf", "expand_to_fused_and_cast"])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("tokens", [2, 258])
def test_padding_rows_can_be_left_as_they_are(name, column_major, tokens):
    """Live rows and all scales are those of the call that fills padding rows, whose data stay NaN."""
    op = find(name)
    options = {} if name == "expand_to_fused" else {"column_major": column_major}
    args = op.bind(*op.inputs(Maker(), tokens=tokens, hidden=256, topk=3, **options))
    names = list(op.signature.parameters)
    padding = args[names.index("pos_to_expert")] < 0
    assert 0 < int(padding.sum()) < len(padding)
    assert args[-1] is True
    filled = op.leaves(op.call("reference", *args))
    with poisoned_outputs():
        left = op.leaves(op.call("simulator", *args[:-1], False))
    data, kept = filled[0].view(torch.uint8), left[0].view(torch.uint8)
    assert torch.equal(kept[~padding], data[~padding])
    assert bool(left[0][padding].float().isnan().all())
    for scales, expected in zip(left[1:], filled[1:], strict=True):
        whole = ((scales.untyped_storage().nbytes() // 4,), (1,))
        assert torch.equal(*(part.as_strided(*whole, 0).view(torch.int32) for part in (scales, expected)))


SF = torch.tensor([[1.0, 2.0], [4.0, 8.0]])


def test_m07_column_major_scales():
    x = torch.randint(0, 127, (2, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    data, sf = expand_to_fused_with_sf((x, SF), 128, POSITIONS, OWNERS, True)
    assert (sf.shape, sf.stride()) == ((6, 2), (1, 8))
    assert sf.t().tolist() == [[1, 0, 0, 0, 1, 4], [2, 0, 0, 0, 2, 8]]
    assert sf.as_strided((16,), (1,)).tolist() == [1, 0, 0, 0, 1, 4, 0, 0, 2, 0, 0, 0, 2, 8, 0, 0]
    raw = x.view(torch.uint8)
    assert torch.equal(data.view(torch.uint8)[[0, 4, 5]], raw[[0, 0, 1]])
    assert data.view(torch.uint8)[1:4].unique().tolist() == [0]


@pytest.mark.parametrize("layout", ["row", "column", "slice"])
def test_scales_are_read_by_their_strides(layout):
    sf = {
        "row": SF,
        "column": SF.t().contiguous().t(),
        "slice": torch.nn.functional.pad(SF, (1, 3), value=9.0)[:, 1:3],
    }[layout]
    x = torch.zeros(2, 256, dtype=torch.float8_e4m3fn)
    _, out = expand_to_fused_with_sf((x, sf), 128, POSITIONS, OWNERS)
    assert out.tolist() == [[1, 2], [0, 0], [0, 0], [0, 0], [1, 2], [4, 8]]
    assert out.stride() == (2, 1)


def test_packed_scales_of_fp4():
    x = torch.zeros(2, 96, dtype=torch.int8)  # 192 channels, 6 blocks of 32, 2 words
    sf = torch.tensor([[0x7F7F7F7F, 0x7F7F], [0x01020304, 0x0506]], dtype=torch.int32)
    _, out = expand_to_fused_with_sf((x, sf), 32, POSITIONS, OWNERS, True)
    assert out.dtype == torch.int32
    assert out.tolist() == [sf[0].tolist(), [0, 0], [0, 0], [0, 0], sf[0].tolist(), sf[1].tolist()]


def test_no_tokens_gives_zeros():
    data, sf = expand_to_fused_with_sf(
        (torch.empty(0, 256, dtype=torch.float8_e4m3fn), torch.empty(0, 2)),
        128,
        torch.empty(0, 2, dtype=torch.int32),
        torch.full((5,), -1, dtype=torch.int32),
        True,
    )
    assert (data.shape, sf.shape, sf.stride()) == ((5, 256), (5, 2), (1, 8))
    assert data.view(torch.uint8).unique().tolist() == [0]
    assert sf.as_strided((16,), (1,)).unique().tolist() == [0.0]
    assert expand_to_fused(torch.zeros(2, 8), POSITIONS, OWNERS[:0]).shape == (0, 8)


def test_positions_out_of_range_are_skipped():
    positions = torch.tensor([[0, 6], [1, -7]], dtype=torch.int32)
    x = torch.tensor([[1.0], [2.0]])
    out = expand_to_fused(x, positions, torch.tensor([0, 0], dtype=torch.int32))
    assert out.tolist() == [[1.0], [2.0]]
    assert find("expand_to_fused").call("simulator", x, positions, OWNERS[[0, 0]]).tolist() == out.tolist()


def test_l04_offsets_past_32_bits():
    """Row 2049 of 1 MiB starts past 2^31; only the rows that are written ever take memory."""
    hidden, rows = 2**20, 2051
    x = torch.full((1, hidden), 5, dtype=torch.int8)
    positions = torch.tensor([[rows - 1]], dtype=torch.int32)
    out = find("expand_to_fused").call("simulator", x, positions, torch.zeros(rows, dtype=torch.int32))
    assert torch.equal(out[-1:], x)


def test_l06_scale_offsets_past_32_bits():
    columns = torch.empty(2**31 // 4 + 2**20, dtype=torch.float32).as_strided((1, 5), (1, 2**27))
    columns[:] = torch.tensor([1.0, 2, 3, 4, 5])
    x = torch.zeros(1, 640, dtype=torch.float8_e4m3fn)
    op = find("expand_to_fused_with_sf")
    _, sf = op.call(
        "simulator", (x, columns), 128, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    )
    assert sf.tolist() == [[1, 2, 3, 4, 5]]


X = torch.zeros(2, 256, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.long(), POSITIONS, OWNERS), TypeError, "x: expected a dtype of 1, 2 or 4 bytes, got int64"),
        ((X[:, ::2], POSITIONS, OWNERS), ValueError, "x: expected a contiguous tensor"),
        ((X[:, :0], POSITIONS, OWNERS), ValueError, "x: expected at least one column"),
        ((X, POSITIONS[:1], OWNERS), ValueError, r"token_topk_to_pos: expected shape \[2, K\], got \[1, 2\]"),
        ((X, POSITIONS.long(), OWNERS), TypeError, "token_topk_to_pos: expected dtype int32, got int64"),
        ((X, POSITIONS, OWNERS[None]), ValueError, r"pos_to_expert: expected shape \[N\], got \[1, 6\]"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=f"^expand_to_fused: {message}"):
        expand_to_fused(*arguments)


@pytest.mark.parametrize(
    ("x", "npc", "column_major", "error", "message"),
    [
        ((X, SF), 64, False, ValueError, "num_per_channels: expected 32 or 128, got 64"),
        ((X, SF), 32, False, ValueError, r"x\[1\]: expected shape \[2, 8\], got \[2, 2\]"),
        ((X, SF.double()), 128, False, TypeError, r"x\[1\]: expected dtype float32 or int32, got float64"),
        (
            (X, SF.int()[:, :1]),
            128,
            False,
            ValueError,
            "use_tma_aligned_col_major_sf: expected True, as the scales are",
        ),
        ((X.view(torch.int8), SF), 128, False, ValueError, r"x\[1\]: expected shape \[2, 4\], got \[2, 2\]"),
        (X, 128, False, TypeError, r"x: expected a \(data, sf\) pair of tensors, got Tensor"),
    ],
)
def test_messages_with_sf(x, npc, column_major, error, message):
    with pytest.raises(error, match=f"^expand_to_fused_with_sf: {message}"):
        expand_to_fused_with_sf(x, npc, POSITIONS, OWNERS, column_major)
