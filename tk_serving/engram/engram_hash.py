"""Table rows of the n-grams that end at each token."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import PHASES, Maker, Workload

_expect = Expect("engram_hash")


def _plan(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None,
) -> Plan:
    tokens, ngram = _expect.tensor("ngram_token_ids", ngram_token_ids, torch.int32, ("T", "n"))
    _expect.that(ngram >= 2, "ngram_token_ids", "at least 2 columns", list(ngram_token_ids.shape))
    layers, _ = _expect.tensor("multipliers", multipliers, torch.int64, ("L", ngram))
    _, _, tables = _expect.tensor("vocab_sizes", vocab_sizes, torch.int32, (layers, ngram - 1, "t"))
    _expect.that(layers > 0, "multipliers", "at least one layer", list(multipliers.shape))
    _expect.that(tables > 0, "vocab_sizes", "at least one table", list(vocab_sizes.shape))
    columns = (ngram - 1) * tables
    _expect.tensor("offsets", offsets, torch.int32, (layers, columns))
    if image_token_mask is not None:
        _expect.tensor("image_token_mask", image_token_mask, torch.bool, (tokens,))
    _expect.same_device(
        ngram_token_ids=ngram_token_ids,
        multipliers=multipliers,
        vocab_sizes=vocab_sizes,
        offsets=offsets,
        image_token_mask=image_token_mask,
    )
    config = {"ngram": ngram, "tables": tables}
    # Without a mask the kernel gets bytes that it does not read.
    scratch = (Out((tokens,), torch.uint8),) if image_token_mask is None else ()
    launch = Launch("engram.engram_hash", config, _arguments)
    return Plan((Out((layers, tokens, columns), torch.int32),), (launch,) if tokens else (), scratch)


def _arguments(
    buffers: list[Tensor],
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None,
) -> tuple:
    mask = buffers[1] if image_token_mask is None else image_token_mask.view(torch.uint8)
    masked = int(image_token_mask is not None)
    return ngram_token_ids, multipliers, vocab_sizes, offsets, mask, buffers[0], masked


def _inputs(
    make: Maker, *, tokens: int, layers: int = 2, ngram: int = 4, tables: int = 8, images: bool = False
) -> tuple:
    ids = make.randint(-1, 129280, tokens, ngram, dtype=torch.int32)
    multipliers = make.randint(-(2**62), 2**62, layers, ngram) * 2 + 1
    vocab_sizes = make.randint(15_990_000, 16_010_000, layers, ngram - 1, tables, dtype=torch.int32)
    flat = vocab_sizes.view(layers, -1)
    offsets = (flat.cumsum(1) - flat).to(torch.int32)
    mask = make.randint(0, 2, tokens, dtype=torch.bool) if images else None
    return ids, make.value(multipliers), vocab_sizes, offsets, mask


@operator(
    spec="operators.md P30",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 0},
        {"tokens": 1},
        {"tokens": 13, "images": True},
        {"tokens": 130, "layers": 1, "ngram": 2, "tables": 1},
        {"tokens": 9, "layers": 3, "ngram": 3, "tables": 5, "images": True},
    ],
    workloads=[Workload(f"v4.1-{phase}", {}, tokens, "v4.1") for phase, tokens in PHASES.items()],
    peers=["tile_kernels"],
)
def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    *,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Rows of the n-gram tables for every layer and token: multiply, exclusive-or, reduce modulo the table size.

    With p_i = id_i * multiplier_i in wrapping 64-bit arithmetic, the hash of the (i + 1)-gram is p_0 ^ ... ^ p_i. Its
    column for table j is the non-negative remainder by ``vocab_sizes[:, i - 1, j]`` plus the offset of that table, and
    -1 where the table size is not positive.

    Args:
        ngram_token_ids: int32 [T, n], contiguous, n >= 2: column 0 is the newest token.
        multipliers: int64 [L, n].
        vocab_sizes: int32 [L, n - 1, t]: rows of each table.
        offsets: int32 [L, (n - 1) t]: normally the exclusive prefix sums of the layer's table sizes. Row plus offset
            must fit 32 bits.
        image_token_mask: bool [T]; True gives -1 in every column of the token.

    Returns:
        int32 [L, T, (n - 1) t], contiguous.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout or device.
    """
    products = ngram_token_ids.long() * multipliers[:, None, :]  # [L, T, n], wraps
    value = products[..., 0]
    columns = []
    for i in range(1, products.shape[-1]):
        value = value ^ products[..., i]
        size = vocab_sizes[:, None, i - 1].long()  # [L, 1, t]
        row = torch.remainder(value[..., None], torch.where(size > 0, size, 1))
        start = (i - 1) * size.shape[-1]
        row = row + offsets[:, None, start : start + size.shape[-1]]
        columns.append(torch.where(size > 0, row, -1))
    rows = torch.cat(columns, dim=-1).to(torch.int32)
    return rows if image_token_mask is None else torch.where(image_token_mask[:, None], -1, rows)
