"""The routed experts of one layer around two grouped matrix products with FP8 activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tk_serving.modeling.fp8_experts.weights import Fp8Weights
from tk_serving.moe.expand_to_fused_and_cast import expand_to_fused_and_cast
from tk_serving.moe.get_fused_mapping import capacity, get_fused_mapping
from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving.operator import Quantized
from tk_serving.quant import marlin
from tk_serving.quant.per_block_cast_lossless_from_marlin import BLOCK, per_block_cast_lossless_from_marlin
from tk_serving.quant.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast

AROUND = ("get_fused_mapping", "expand_to_fused_and_cast", "swiglu_forward_and_per_token_cast", "reduce_fused")
"""The operators around the products."""

OPERATORS = ("per_block_cast_lossless_from_marlin", *AROUND)
"""The operators that take part with FP8 weights."""

Call = tuple[Callable[..., Any], tuple, dict[str, Any]]
"""An operator, its arguments and its keyword arguments."""


class Product(Protocol):
    """A grouped matrix product: ``out[rows of e] = x[rows of e] @ weight[e].T``."""

    def __call__(self, x: Quantized, weight: Quantized, out: Tensor, pos_to_expert: Tensor) -> None:
        """Compute the rows of experts; rows with a negative expert may be left as they are.

        Args:
            x: float8_e4m3fn [N, K] and float32 scales [N, K / 128], column-major with columns on 16 bytes.
            weight: float8_e4m3fn [E, M, K] and float32 scales [E, M / 128, K / 128].
            out: bfloat16 [N, M].
            pos_to_expert: int32 [N]; every aligned run of rows has one expert, then padding of -1.
        """


@dataclass(frozen=True)
class Rows:
    """Where the rows of every expert lie: of the results of ``get_fused_mapping``, what a product reads."""

    pos_to_expert: Tensor
    expert_start: Tensor
    num_tokens_per_expert: Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of the routed experts of one layer on one rank.

    Attributes:
        experts: E.
        width: 2 I, gate above up.
        hidden: H.
    """

    experts: int
    width: int
    hidden: int

    def rows(self, pairs: int, alignment: int) -> int:
        """Rows of the expert-major layout that suffice for so many (token, choice) pairs."""
        return capacity(pairs, self.experts, alignment)

    def buffer(self, pairs: int, alignment: int) -> int:
        """Elements of the buffer that the results of both products share."""
        return self.rows(pairs, alignment) * max(self.width, self.hidden)


def routed_experts(
    x: Tensor,
    weights: Fp8Weights,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    product: Product,
    *,
    alignment: int = 128,
    swiglu_limit: float | None = None,
    round_sf: bool = True,
    sf_clamp_min: float | None = None,
    out: Tensor | None = None,
    after_products: Callable[[], None] = lambda: None,
) -> Tensor:
    """Sum over the choices of each token of weight * down(silu(gate(x)) * up(x)), with weights and activations in FP8.

    Nothing is copied to the host, and shapes depend on shapes alone: the call may be captured in a CUDA graph.

    Args:
        x: bfloat16 [T, H].
        weights: of the E experts of this rank, with hidden size H and intermediate size I.
        topk_ids: integer [T, K], ids among the E experts; others have no part in the sum.
        topk_weights: float32 [T, K], or None for weights of 1.
        product: the grouped matrix product.
        alignment: the rows of an expert start at multiples of this.
        swiglu_limit: upper limit of the gate, and of the magnitude of up.
        round_sf: scales of activations are powers of two, as DeepSeek-V4 was trained.
        sf_clamp_min: smallest maximum of a group of 128 activations; by default 1e-4.
        out: preallocated result.
        after_products: called once the last kernel that reads the weights is launched.

    Returns:
        bfloat16 [T, H].

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape or layout.
    """

    def first(a: Quantized, inner: Tensor, rows: Rows) -> None:
        product(a, (weights.w13, weights.w13_sf), inner, rows.pos_to_expert)

    def second(b: Quantized, outer: Tensor, rows: Rows) -> None:
        product(b, (weights.w2, weights.w2_sf), outer, rows.pos_to_expert)
        after_products()

    if not len(topk_ids):
        after_products()
    return around(
        x,
        Shape(*weights.w13.shape),
        topk_ids,
        topk_weights,
        first,
        second,
        alignment=alignment,
        swiglu_limit=swiglu_limit,
        round_sf=round_sf,
        sf_clamp_min=sf_clamp_min,
        out=out,
    )


def around(
    x: Tensor,
    shape: Shape,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    first: Callable[[Quantized, Tensor, Rows], None],
    second: Callable[[Quantized, Tensor, Rows], None],
    *,
    alignment: int,
    swiglu_limit: float | None,
    round_sf: bool,
    sf_clamp_min: float | None,
    out: Tensor | None,
    buffer: Tensor | None = None,
) -> Tensor:
    """Everything but the products: ``first`` and ``second`` compute ``x @ w13.T`` and ``x @ w2.T`` into a tensor.

    Args:
        buffer: contiguous, of the dtype of ``x``, with at least :meth:`Shape.buffer` elements; content is lost.
    """
    tokens, topk = topk_ids.shape
    if not tokens:
        return torch.empty_like(x) if out is None else out
    rows, width, hidden = shape.rows(tokens * topk, alignment), shape.width, shape.hidden
    ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.long()
    mapping = get_fused_mapping(ids, shape.experts, rows, alignment, True)
    pos_to_expert, token_topk_to_pos = mapping[0], mapping[3]
    where = Rows(pos_to_expert, expert_start=mapping[4], num_tokens_per_expert=mapping[6])
    # What the products make of padding rows nobody reads, so that these rows need not be zeros.
    cast = {"round_sf": round_sf, "zero_padding": False}
    a = expand_to_fused_and_cast(x, "e4m3", BLOCK, token_topk_to_pos, pos_to_expert, True, **cast)
    # One buffer for both products: the first result is dead once it is cast.
    if buffer is None:
        buffer = torch.empty(shape.buffer(tokens * topk, alignment), dtype=x.dtype, device=x.device)
    inner = buffer[: rows * width].view(rows, width)
    first(a, inner, where)
    b = swiglu_forward_and_per_token_cast(
        inner,
        "e4m3",
        BLOCK,
        pos_to_expert=pos_to_expert,
        use_tma_aligned_col_major_sf=True,
        swiglu_clamp_value=swiglu_limit,
        sf_clamp_min=sf_clamp_min,
        **cast,
    )
    outer = buffer[: rows * hidden].view(rows, hidden)
    second(b, outer, where)
    return reduce_fused(outer, topk_weights, token_topk_to_pos, out=out)


def calls(
    tokens: int,
    topk: int,
    experts: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    alignment: int = 128,
    swiglu_limit: float | None = None,
    sf_clamp_min: float | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> Iterator[Call]:
    """The calls of :func:`routed_experts` and of the upcast before it, on meta tensors.

    To ask whether the operators run them, before the first does. Shapes as there; ``width`` is 2 I.
    """
    for n, k in ((width, hidden), (hidden, width // 2)):
        codes = (
            meta(torch.int32, experts, k // marlin.TILE_K, 2 * n),
            meta(torch.uint8, experts, k // marlin.GROUP, n),
        )
        yield per_block_cast_lossless_from_marlin, (codes, meta(torch.float32, experts, n // BLOCK, k // BLOCK)), {}
    shape = Shape(experts, width, hidden)
    yield from calls_around(tokens, topk, shape, dtype, alignment, swiglu_limit, sf_clamp_min, ids_dtype)


def calls_around(
    tokens: int,
    topk: int,
    shape: Shape,
    dtype: torch.dtype,
    alignment: int,
    swiglu_limit: float | None,
    sf_clamp_min: float | None,
    ids_dtype: torch.dtype,
) -> Iterator[Call]:
    """The calls of :func:`around`, on meta tensors."""
    rows = shape.rows(tokens * topk, alignment)
    token_topk_to_pos, pos_to_expert = meta(torch.int32, tokens, topk), meta(torch.int32, rows)
    yield get_fused_mapping, (meta(ids_dtype, tokens, topk), shape.experts, rows, alignment, True), {}
    cast = {"round_sf": True, "zero_padding": False}
    mapping = (token_topk_to_pos, pos_to_expert)
    yield expand_to_fused_and_cast, (meta(dtype, tokens, shape.hidden), "e4m3", BLOCK, *mapping, True), cast
    flags = {"use_tma_aligned_col_major_sf": True, "pos_to_expert": pos_to_expert, **cast}
    flags |= {"swiglu_clamp_value": swiglu_limit, "sf_clamp_min": sf_clamp_min}
    yield swiglu_forward_and_per_token_cast, (meta(dtype, rows, shape.width), "e4m3", BLOCK), flags
    yield reduce_fused, (meta(dtype, rows, shape.hidden), meta(torch.float32, tokens, topk), token_topk_to_pos), {}


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
