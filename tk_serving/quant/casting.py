"""What the casts of a [T, H] tensor share: the forms of their input, their checks, their values in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tk_serving.expect import Expect, short
from tk_serving.layout import aligned
from tk_serving.operator import Quantized
from tk_serving.plan import Launch, Out
from tk_serving.quant import rand, scales
from tk_serving.quant.formats import FORMATS, decode, encode
from tk_serving.quant.rounding import stochastic as stochastic_rounding

GROUPS = (16, 32, 64, 128)
"""Group sizes of per-token casts besides the whole row."""

Tensors = Sequence[Tensor | None]

CODES = {torch.float8_e4m3fn: "e4m3", torch.int8: "e2m1", torch.uint8: "e5m6"}


@dataclass(frozen=True)
class Input:
    """A checked input of a cast.

    Attributes:
        tokens, hidden: its shape in values.
        config: compile-time arguments of the kernels that describe it.
        data, sf: the tensors; ``sf`` is None for a plain input.
    """

    tokens: int
    hidden: int
    config: dict[str, object]
    data: Tensor
    sf: Tensor | None


def check_input(
    expect: Expect, x: Tensor | Quantized, x_block_size: Sequence[int] | None, fmt: str, *, special: bool = False
) -> Input:
    """Check the input of a cast to ``fmt``: bf16/f32 [T, H], or a pair of codes and scales with its block size.

    ``special``: the codes are e5m6.
    """
    if isinstance(x, Tensor):
        expect.that(x_block_size is None, "x_block_size", "None, as x has no scales", x_block_size)
        tokens, hidden = expect.tensor("x", x, (torch.bfloat16, torch.float32), ("T", "H"), contiguous=False)
        check_hidden(expect, hidden, fmt)
        return Input(tokens, hidden, {"x": short(x.dtype), "x_sf": None, "x_block": (1, 0)}, x, None)
    data, sf = x
    dtypes = (torch.uint8,) if special else (torch.float8_e4m3fn, torch.int8)
    tokens, width = expect.tensor("x[0]", data, dtypes, ("T", "any"), contiguous=False)
    source = CODES[data.dtype]
    if source == "e5m6":
        expect.multiple("x[0]", width, 12, "a last dimension")
    hidden = width * 8 // FORMATS[source].bytes
    check_hidden(expect, hidden, source)
    if x_block_size is None:
        expect.fail("x_block_size", "the (rows, columns) of a block of x[1]", None)
    block_m, block_k = check_block(expect, "x_block_size", x_block_size, hidden)
    scales.check_sf(expect, "x[1]", sf, -(-tokens // block_m), -(-hidden // block_k))
    expect.same_device(**{"x[0]": data, "x[1]": sf})
    block = (block_m, 0 if block_k >= hidden else block_k)
    return Input(tokens, hidden, {"x": source, "x_sf": short(sf.dtype), "x_block": block}, data, sf)


def check_hidden(expect: Expect, hidden: int, fmt: str) -> None:
    factor = 8 if fmt == "e5m6" else 16
    expect.that(hidden > 0 and hidden % factor == 0, "x", f"H that is a positive multiple of {factor}", hidden)


def check_block(expect: Expect, argument: str, block: Sequence[int], hidden: int) -> tuple[int, int]:
    """Rows >= 1; columns a multiple of 8, so that eight columns share their scale."""
    expect.that(len(block) == 2, argument, "(rows, columns)", block)
    rows, columns = block
    ok = rows >= 1 and columns >= 1 and (columns % 8 == 0 or columns >= hidden)
    expect.that(ok, argument, "positive (rows, columns), columns a multiple of 8", tuple(block))
    return rows, columns


def check_channels(expect: Expect, num_per_channels: int, hidden: int, groups: Sequence[int] = GROUPS) -> None:
    ok = num_per_channels in groups or num_per_channels == hidden
    expected = f"{', '.join(str(g) for g in groups)} or H = {hidden}"
    expect.that(ok, "num_per_channels", expected, num_per_channels)


def data_out(fmt: str, tokens: int, hidden: int) -> Out:
    """The allocation for quantised data."""
    return Out((tokens, FORMATS[fmt].columns(hidden)), FORMATS[fmt].dtype)


def check_given(expect: Expect, argument: str, given: Tensor, out: Out) -> None:
    """A preallocated result is exactly what would have been allocated, padding rows of its storage included."""
    expect.same(argument, given, out.shape, out.dtype, out.strides)
    if out.storage is not None:
        room = given.untyped_storage().nbytes() // out.dtype.itemsize - given.storage_offset()
        expect.that(room >= out.storage, argument, f"storage of {out.storage} elements", room)


# -- the kernels ----------------------------------------------------------------------------------------------


def cast_launch(
    source: Input,
    fmt: str,
    num_per_channels: int,
    layout: str,
    round_sf: bool,
    *,
    sf_only: bool = False,
    given: Tensors = (),
    stochastic: bool = False,
    seed: int | None = None,
) -> Launch:
    """The kernel of a cast with outputs (data, sf), or with the output sf alone.

    ``given``: caller-owned outputs, which need not start on words of 16 bytes.
    """
    config = dict(source.config, fmt=fmt, layout=layout, round_sf=round_sf, with_data=not sf_only)
    config["stochastic"] = stochastic
    config["aligned"] = aligned(source.data, *given)
    if num_per_channels in GROUPS:
        config["npc"] = num_per_channels
        return Launch("quant.per_token_cast:by_group", config, _arguments(sf_only, stochastic, seed))
    octets = source.hidden // 8
    warps = min(32, -(-octets // 128))
    held = -(-octets // (32 * warps))
    config |= {"warps": warps, "held": held if held <= 8 else 0}
    return Launch("quant.per_token_cast:by_token", config, _arguments(sf_only, stochastic, seed))


def blocks(source: Input) -> int:
    """Of a cast with scales of groups: four tokens and 512 columns each."""
    return -(-source.tokens // 4) * -(-source.hidden // 512)


def _arguments(sf_only: bool, stochastic: bool, seed: int | None) -> Callable[..., Sequence[Any]]:
    def arguments(outputs: Tensors, x: Tensor | Quantized, *_: object) -> Sequence[Any]:
        data, sf = (None, outputs[0]) if sf_only else outputs
        values = (x, None) if isinstance(x, Tensor) else x
        return (*values, data, sf, rand.next_state(values[0].device, seed) if stochastic else None)

    return arguments


def rescale_launch(
    source: Input,
    fmt: str,
    sf: Tensor | None,
    block: tuple[int, int],
    given: Tensor | None,
    *,
    stochastic: bool = False,
    seed: int | None = None,
) -> Launch:
    """The kernel that writes the input in another format: ``sf`` are the given scales of a quantised result."""
    config = dict(source.config, fmt=fmt, sf=None if sf is None else short(sf.dtype), sf_block=block)
    config["stochastic"] = stochastic
    config["aligned"] = aligned(source.data, given)

    def arguments(outputs: Tensors, x: Tensor | Quantized, *_: object) -> Sequence[Any]:
        values = (x, None) if isinstance(x, Tensor) else x
        return (*values, sf, outputs[0], rand.next_state(values[0].device, seed) if stochastic else None)

    return Launch("quant.rescale", config, arguments)


# -- the reference --------------------------------------------------------------------------------------------


def values_of(
    x: Tensor | Quantized, x_block_size: Sequence[int] | None, fmt: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """float32 (values or codes [T, H], scale of every element or None); ``fmt`` of the codes, by dtype if None."""
    if isinstance(x, Tensor):
        return x.float(), None
    data, sf = x
    codes = decode(data, fmt or CODES[data.dtype])
    tokens, hidden = codes.shape
    block_m, block_k = cast("Sequence[int]", x_block_size)  # given with every pair, as the plan checked
    factor = scales.read(sf, -(-hidden // block_k))
    return codes, scales.per_element(factor, block_m, block_k, tokens, hidden)


def dequantised(x: Quantized, x_block_size: Sequence[int]) -> Tensor:
    """float32 [T, H]: codes times their scales."""
    codes, factor = values_of(x, x_block_size)
    return codes if factor is None else codes * factor


def amax_of(values: Tensor, factor: Tensor | None, block_m: int, block_k: int) -> Tensor:
    """[M, Kb] amax of the values of each block."""
    size = values.abs()
    return scales.block_amax(size if factor is None else size * factor, block_m, block_k)


def quantize(
    values: Tensor,
    factor: Tensor | None,
    inverse: Tensor,
    fmt: str,
    block_m: int,
    block_k: int,
    state: Tensor | None = None,
) -> Tensor:
    """Codes of values * inverse, or of values * (factor * inverse); ``inverse`` [M, Kb] is one for each block.

    With the ``state`` of random bits they are rounded stochastically.
    """
    tokens, hidden = values.shape
    multiplier = scales.per_element(inverse, block_m, block_k, tokens, hidden)
    scaled = values * (multiplier if factor is None else factor * multiplier)
    if state is not None:
        scaled = stochastic_rounding(scaled, rand.random_bits(state, scaled.numel()).view(scaled.shape), fmt)
    return encode(scaled, fmt)
