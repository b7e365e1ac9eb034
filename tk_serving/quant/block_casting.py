"""What the casts with one scale for each block of rows and columns share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.plan import Launch
from tk_serving.quant import casting, samples, scales
from tk_serving.workloads import MODELS, Maker, Workload

SIZES = (32, 128)


def check(expect: Expect, x: Tensor, fmt: str, block_size: Sequence[int]) -> tuple[casting.Input, int, int]:
    """Check the arguments that all three casts have; the input, and how many blocks lie down and across."""
    expect.one_of("fmt", fmt, ("e4m3", "e2m1"))
    source = casting.check_input(expect, x, None, fmt)
    expect.that(x.is_contiguous(), "x", "a contiguous tensor", f"strides {list(x.stride())}")
    ok = len(block_size) == 2 and all(size in SIZES for size in block_size)
    expect.that(ok, "block_size", "(rows, columns), each 32 or 128", tuple(block_size))
    block_m, block_k = block_size
    return source, -(-source.tokens // block_m), -(-source.hidden // block_k)


def launch(
    source: casting.Input,
    fmt: str,
    block_size: Sequence[int],
    layout: str,
    round_sf: bool,
    *,
    sf_only: bool = False,
    given: casting.Tensors = (),
) -> Launch:
    """The kernel of a cast with outputs (data, sf), or with the output sf alone."""
    config = {"x": source.config["x"], "fmt": fmt, "block": tuple(block_size), "layout": layout, "round_sf": round_sf}
    config |= {"with_data": not sf_only, "aligned": aligned(source.data, *given)}

    def arguments(outputs: casting.Tensors, x: Tensor, *_: object) -> Sequence[Any]:
        data, sf = (None, outputs[0]) if sf_only else outputs
        return x, data, sf

    return Launch("quant.per_block_cast", config, arguments)


def inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    block: tuple[int, int],
    fmt: str = "e4m3",
    source: str = "bfloat16",
    values: str = "normal",
    column_major: bool = False,
    round_sf: bool = False,
    packed: bool = False,
) -> tuple:
    """Arguments of ``per_block_cast``."""
    x = samples.matrix(make, tokens, hidden, getattr(torch, source), values)
    return x, fmt, block, column_major, round_sf, packed


def weights(**params: Any) -> list[Workload]:
    """Gate and up weights of one expert and of eight, as rows of a matrix, in the models' weight blocks."""
    found = []
    for model in MODELS:
        mxfp8 = model.quant_group == 32
        block = {"block": (32, 32) if mxfp8 else (128, 128), "hidden": model.hidden_size}
        rows = 2 * model.moe_intermediate_size
        found.append(Workload(f"{model.name}-experts", block | params, (rows, 8 * rows), model.key))
    return found


def scaled(flags: tuple[bool, bool, bool], expect: Expect, rows: int, blocks: int) -> tuple[str, Any]:
    """The layout that (column-major, rounded, packed) select, and the allocation for the scales."""
    layout = scales.layout_of(expect, *flags)
    return layout, scales.sf_out(layout, rows, blocks)
