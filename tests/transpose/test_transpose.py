"""transpose and batched_transpose: bytes, layouts, limits, messages."""

import pytest
import torch

from tk_serving.transpose import batched_transpose, transpose

DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.float32,
    torch.int32,
]


def some_bytes(*shape, dtype):
    raw = (
        torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64)
        * 37
        % (2 if dtype == torch.bool else 251)
    )
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def as_bytes(x):
    return x.contiguous().view(torch.uint8).reshape(*x.shape, x.itemsize).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_bytes(dtype):
    x = some_bytes(3, 5, dtype=dtype)
    y = transpose(x)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((5, 3), dtype, True)
    source, result = as_bytes(x), as_bytes(y)
    assert all(result[j][i] == source[i][j] for i in range(3) for j in range(5))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
def test_batch(dtype):
    x = some_bytes(2, 3, 4, dtype=dtype)
    y = batched_transpose(x)
    assert (y.shape, y.is_contiguous()) == ((2, 4, 3), True)
    assert as_bytes(y) == [as_bytes(transpose(matrix)) for matrix in x]


def test_nan_payloads_survive():
    x = torch.tensor([[0x7FC12345, 0x7F812345]], dtype=torch.int32).view(torch.float32)
    assert transpose(x).view(torch.int32).flatten().tolist() == [0x7FC12345, 0x7F812345]


def test_free_strides():
    base = torch.arange(6 * 40).view(6, 40).to(torch.int16)
    for x in (base[:, 3:20], base[::2, :16], base[1:2], base[:1].expand(5, 40)):
        assert transpose(x).tolist() == [list(column) for column in zip(*x.tolist(), strict=True)]
    one_column = base[:, ::8][:, :1]
    assert one_column.stride() == (40, 8)
    assert transpose(one_column).tolist() == [base[:, 0].tolist()]
    batch = base.view(6, 4, 10).transpose(0, 1)[:, :, 2:]
    assert batched_transpose(batch).tolist() == batch.transpose(1, 2).tolist()


def test_t02_misaligned_view():
    buffer = torch.arange(129).to(torch.bfloat16)
    x = buffer[1:].view(1, 128)
    assert torch.equal(transpose(x), transpose(x.clone()))
    assert transpose(x).flatten().tolist() == list(range(1, 129))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)])
def test_t03_empty(shape):
    x = torch.empty(shape[0], 256, dtype=torch.bfloat16)[:, : shape[1]]
    assert transpose(x).shape == shape[::-1]
    assert batched_transpose(x[None]).shape == (1, *shape[::-1])
    assert batched_transpose(torch.empty(0, 4, 8)).shape == (0, 8, 4)


def test_messages():
    with pytest.raises(TypeError, match=r"^transpose: x: expected a dtype of 1, 2 or 4 bytes, got float64$"):
        transpose(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^transpose: x: expected shape \[M, N\], got \[1, 2, 3\]$"):  # T04
        transpose(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"^batched_transpose: x: expected shape \[B, M, N\], got \[2, 3\]$"):
        batched_transpose(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"^transpose: x: expected stride\(-1\) == 1, got strides \[1, 4\]$"):
        transpose(torch.zeros(3, 4).t())
    with pytest.raises(TypeError, match=r"^transpose: x: expected a torch.Tensor, got list$"):
        transpose([[1.0]])
