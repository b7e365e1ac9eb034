"""Routed experts whose FP4 weights are multiplied by FP8 activations as they are: no second form of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tk_serving.gemm import tiles
from tk_serving.gemm.grouped_gemm_fp8_fp4 import grouped_gemm_fp8_fp4
from tk_serving.modeling.fp8_experts import chain
from tk_serving.modeling.fp8_experts.weights import Fp4Weights
from tk_serving.operator import Quantized
from tk_serving.quant import marlin
from tk_serving.quant.per_block_cast_lossless_from_marlin import BLOCK

OPERATORS = ("grouped_gemm_fp8_fp4", *chain.AROUND)
"""The operators that take part."""

ALIGNMENT = 8
"""Rows to a multiple of which the region of an expert is padded: the narrowest tile of the product."""


@dataclass(frozen=True)
class Fp4Tiles:
    """Weights of E experts in the layout of :mod:`tk_serving.gemm.tiles`.

    Attributes:
        w13: uint8 [E, 2 I / 64, H / 128, 4352], gate above up.
        w13_sf: float32 [E, 2 I], a scale for each row.
        w2: uint8 [E, H / 64, I / 128, 4352].
        w2_sf: float32 [E, H].
    """

    w13: Tensor
    w13_sf: Tensor
    w2: Tensor
    w2_sf: Tensor

    @classmethod
    def of_words(cls, shape: chain.Shape, w13: Tensor, w13_sf: Tensor, w2: Tensor, w2_sf: Tensor) -> Fp4Tiles:
        """Of weights as :func:`words` gives them."""
        return cls(from_words(w13, shape.width), w13_sf, from_words(w2, shape.hidden), w2_sf)

    @property
    def shape(self) -> chain.Shape:
        return chain.Shape(len(self.w13), self.w13_sf.shape[1], self.w2_sf.shape[1])

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.w13_sf, self.w2, self.w2_sf))


def refusal(weights: Fp4Weights) -> str | None:
    """Why weights cannot be laid out as tiles, or None. Reads the scales, and codes where they decide."""
    shape = weights.refusal_of_shape()
    if shape is not None:
        return shape
    pairs = ((weights.w13, weights.w13_sf), (weights.w2, weights.w2_sf))
    if all(tiles.exact(codes, sf.view(torch.uint8)) for codes, sf in pairs):
        return None
    return f"scales of a row span more than {tiles.REACH} powers of two"


def laid_out(codes: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles and scales of rows of one weight in Marlin's layout; as many bytes, and four for each row."""
    return tiles.from_marlin(codes, sf.view(torch.uint8))


def words(weight: Tensor) -> Tensor:
    """Tiles of [M, K] as int32 [E, K / 16, 17 M / 8]: engines read sizes off the first dimensions of Marlin's weights,
    of which there are as many here; the last one is none of theirs."""
    experts, _, blocks, _ = weight.shape
    return weight.view(torch.int32).view(experts, blocks * tiles.COLUMNS // marlin.TILE_K, -1)


def from_words(weight: Tensor, rows: int) -> Tensor:
    """The inverse of :func:`words`, for weights of ``rows`` rows."""
    return weight.view(torch.uint8).view(len(weight), rows // tiles.ROWS, -1, tiles.TILE)


def routed_experts(
    x: Tensor,
    weights: Fp4Tiles,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    *,
    total: int = 0,
    swiglu_limit: float | None = None,
    round_sf: bool = True,
    sf_clamp_min: float | None = None,
    out: Tensor | None = None,
    buffer: Tensor | None = None,
) -> Tensor:
    """Sum over the choices of each token of weight * down(silu(gate(x)) * up(x)), with activations in FP8.

    Nothing is copied to the host, and shapes depend on shapes alone: the call may be captured in a CUDA graph.

    Args:
        x: bfloat16 [T, H].
        weights: of the E experts of this rank, with hidden size H and intermediate size I.
        topk_ids: integer [T, K], ids among the E experts; others have no part in the sum.
        topk_weights: float32 [T, K], or None for weights of 1.
        total: experts of all ranks, among which a token chooses; 0 for E.
        swiglu_limit: upper limit of the gate, and of the magnitude of up.
        round_sf: scales of activations are powers of two, as DeepSeek-V4 was trained.
        sf_clamp_min: smallest maximum of a group of 128 activations; by default 1e-4.
        out: preallocated result.
        buffer: contiguous, of the dtype of ``x``, with at least :meth:`chain.Shape.buffer` elements; content is lost.

    Returns:
        bfloat16 [T, H].

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape or layout.
    """
    shape = weights.shape
    share = topk_ids.numel() / (total or shape.experts)

    def product(weight: Quantized) -> Callable[[Quantized, Tensor, chain.Rows], None]:
        def multiply(a: Quantized, result: Tensor, rows: chain.Rows) -> None:
            starts = rows.expert_start, rows.num_tokens_per_expert
            grouped_gemm_fp8_fp4(a, weight, *starts, rows_per_expert=share, out=result)

        return multiply

    return chain.around(
        x,
        shape,
        topk_ids,
        topk_weights,
        product((weights.w13, weights.w13_sf)),
        product((weights.w2, weights.w2_sf)),
        alignment=ALIGNMENT,
        swiglu_limit=swiglu_limit,
        round_sf=round_sf,
        sf_clamp_min=sf_clamp_min,
        out=out,
        buffer=buffer,
    )


def calls(
    tokens: int,
    topk: int,
    shape: chain.Shape,
    total: int,
    dtype: torch.dtype,
    swiglu_limit: float | None,
    sf_clamp_min: float | None,
    ids_dtype: torch.dtype = torch.int32,
) -> Iterator[chain.Call]:
    """The calls of :func:`routed_experts`, on meta tensors: to ask whether the operators run them, and to bring their
    kernels into memory."""
    rows = shape.rows(tokens * topk, ALIGNMENT)
    counts = chain.meta(torch.int32, shape.experts)
    share = {"rows_per_expert": tokens * topk / total}
    for m, k in ((shape.width, shape.hidden), (shape.hidden, shape.width // 2)):
        sf = chain.meta(torch.float32, k // BLOCK, -(-rows // 4) * 4).T[:rows]
        a = chain.meta(torch.float8_e4m3fn, rows, k), sf
        weight = (
            chain.meta(torch.uint8, shape.experts, m // tiles.ROWS, k // tiles.COLUMNS, tiles.TILE),
            chain.meta(torch.float32, shape.experts, m),
        )
        out = chain.meta(dtype, rows, m)
        yield grouped_gemm_fp8_fp4, (a, weight, counts, counts), {**share, "out": out}
    yield from chain.calls_around(tokens, topk, shape, dtype, ALIGNMENT, swiglu_limit, sf_clamp_min, ids_dtype)
