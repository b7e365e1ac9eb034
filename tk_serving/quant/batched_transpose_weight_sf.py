"""The scales of block-quantised weights and of their transposes, as DeepGEMM reads them (operators.md A8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.quant.batched_transpose_weight_sf_out import allocations, batched_transpose_weight_sf_out, expect

Pair = tuple[Tensor, Tensor]


def batched_transpose_weight_sf(
    sf: Sequence[Tensor],
    block_size: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[Pair | None],
) -> list[Pair]:
    """Packed exponents, one row for each row of a weight and of its transpose, of the scales of square blocks.

    The lists have one entry for each weight [(g,) n, k]. Sign and mantissa of a scale do not take part.

    Args:
        sf: float32 [(g,) n / b, k / b], contiguous: positive powers of two; n and k multiples of 128.
        block_size: b, 32 or 128.
        transpose_sf1s: whether sf1 comes as rows of the storage.
        outs: a pair from an earlier call, which is written again and returned, or None.

    Returns:
        (sf0, sf1) for each weight. sf0: int32 [(g,) n, ceil(k / b / 4)], strides (1, n): byte j of word w in row r is
        the exponent of block (r // b, 4 w + j), 0 where there is none. sf1: int32 [(g,) k, ceil(n / b / 4)], strides
        (1, k): the same of the transposed weight; or int32 [(g,) ceil(n / b / 4), k], contiguous.

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, block size or length of a list.
    """
    sf = list(sf)
    for name, given in (("transpose_sf1s", transpose_sf1s), ("outs", outs)):
        expect.that(len(given) == len(sf), name, f"{len(sf)} entries, one for each tensor of sf", len(given))
    if not sf:
        return []
    pairs: list[Pair] = []
    for i, (scales, flag, out) in enumerate(zip(sf, transpose_sf1s, outs, strict=True)):
        if out is None:
            expect.kind(isinstance(scales, Tensor), f"sf[{i}]", "a torch.Tensor", type(scales).__name__)
            first, second = allocations(i, scales, block_size, flag)
            pairs.append((first.empty(scales.device), second.empty(scales.device)))
        else:
            ok = isinstance(out, (tuple, list)) and len(out) == 2 and all(isinstance(t, torch.Tensor) for t in out)
            expect.kind(ok, f"outs[{i}]", "None or a pair of tensors", type(out).__name__)
            pairs.append((out[0], out[1]))
    batched_transpose_weight_sf_out(sf, block_size, list(transpose_sf1s), [p[0] for p in pairs], [p[1] for p in pairs])
    return pairs
