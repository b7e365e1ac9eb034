"""Scales of quantised blocks: the rule that makes them, their layouts in memory, and how any layout is read."""

from __future__ import annotations

import torch
from torch import Tensor

from tk_serving.expect import Expect, short
from tk_serving.plan import Out
from tk_serving.quant.formats import LARGEST, Format

ROW, COLUMN, PACKED, E4M3, E4M3_COLUMN = "row", "column", "packed", "e4m3", "e4m3_column"
"""Layouts: float32 dense; float32 column-major with columns on 16 bytes; four UE8M0 exponents in an int32,
column-major; float8_e4m3fn dense; float8_e4m3fn column-major."""

SF_DTYPES = (torch.float32, torch.int32, torch.float8_e4m3fn)


def layout_of(expect: Expect, column_major: bool, round_sf: bool, packed: bool, e4m3: bool = False) -> str:
    """The layout that the flags of an operator select.

    Raises:
        ValueError: packing without column-major or without rounding; e4m3 scales with rounding or packing.
    """
    if packed:
        expect.that(column_major, "use_packed_ue8m0", "use_tma_aligned_col_major_sf as well", False)
        expect.that(round_sf, "use_packed_ue8m0", "round_sf as well", False)
        expect.that(not e4m3, "use_e4m3_sf", "no use_packed_ue8m0", True)
        return PACKED
    if e4m3:
        expect.that(not round_sf, "use_e4m3_sf", "no round_sf", True)
        return E4M3_COLUMN if column_major else E4M3
    return COLUMN if column_major else ROW


def sf_out(layout: str, rows: int, blocks: int) -> Out:
    """The allocation for ``rows`` x ``blocks`` scales; column-major storage has its rows padded to 16 bytes."""
    if layout == ROW:
        return Out((rows, blocks), torch.float32)
    if layout == E4M3:
        return Out((rows, blocks), torch.float8_e4m3fn)
    dtype = {COLUMN: torch.float32, PACKED: torch.int32, E4M3_COLUMN: torch.float8_e4m3fn}[layout]
    columns = -(-blocks // 4) if layout == PACKED else blocks
    per_16_bytes = 16 // dtype.itemsize
    stride = -(-rows // per_16_bytes) * per_16_bytes
    return Out((rows, columns), dtype, (1, stride), columns * stride)


def check_sf(expect: Expect, argument: str, sf: Tensor, rows: int, blocks: int) -> None:
    """A scale argument has a known dtype and the shape that its block size implies; its strides may be any."""
    expect.dtype(argument, sf, *SF_DTYPES)
    columns = -(-blocks // 4) if sf.dtype == torch.int32 else blocks
    expect.that(
        tuple(sf.shape) == (rows, columns),
        argument,
        f"shape [{rows}, {columns}] ({short(sf.dtype)} scales of {rows} x {blocks} blocks)",
        list(sf.shape),
    )


def rule(
    amax: Tensor, fmt: Format, round_sf: bool, e4m3_sf: bool = False, floor: float | None = None
) -> tuple[Tensor, Tensor]:
    """(sf, multiplier applied to x) of blocks with these float32 maxima; sf is float8_e4m3fn with ``e4m3_sf``.

    ``floor`` replaces the smallest amax of the format. Divisors are tensors throughout: torch multiplies by the
    reciprocal of a Python number on CUDA, which changes the last bit.
    """
    if floor is None:
        floor = fmt.maximum * 2.0**-9 if e4m3_sf else fmt.floor
    amax = amax.clamp(max=LARGEST).clamp(min=floor)
    maximum = torch.full_like(amax, fmt.maximum)
    sf = amax / maximum
    if round_sf:
        bits = (sf.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        return bits.view(torch.float32), ((254 << 23) - bits).view(torch.float32)
    if e4m3_sf:
        sf = sf.clamp(max=448.0).to(torch.float8_e4m3fn)
        return sf, torch.ones_like(amax) / sf.float()
    return sf, maximum / amax


def lay_out(sf: Tensor, layout: str) -> Tensor:
    """[M, Kb] scales in a layout; padding is 0. ``packed`` keeps the exponents only."""
    rows, blocks = sf.shape
    stored = sf_out(layout, rows, blocks).zeros(sf.device)
    if layout == PACKED:
        return stored.copy_(pack(sf.view(torch.int32) >> 23))
    return stored.copy_(sf.to(stored.dtype))


def exponents(sf: Tensor, blocks: int) -> Tensor:
    """int32 [M, Kb] biased exponents of float32 or packed scales; sign and mantissa do not matter."""
    if sf.dtype == torch.float32:
        return sf.view(torch.int32) >> 23 & 255
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=sf.device)
    return (sf[..., None] >> shifts & 255).flatten(-2)[:, :blocks]


def of_exponents(exponents: Tensor) -> Tensor:
    """float32 scales of biased exponents; 0 is 2^-127, 255 is NaN."""
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23).to(torch.int32)
    return torch.where(exponents == 255, torch.nan, bits.view(torch.float32))


def pack(exponents: Tensor) -> Tensor:
    """int32 [..., ceil(Kb / 4)]: four exponents in a word, the first in its lowest byte; missing bytes are 0."""
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4))
    return padded.to(torch.uint8, memory_format=torch.contiguous_format).view(torch.int32)


def powers_of_two(sf: Tensor) -> bool:
    """Whether all float32 scales are positive normal powers of two. Reads the data."""
    bits = sf.contiguous().view(torch.int32)
    return bool(((bits > 0) & (bits & 0x7FFFFF == 0) & (bits < 0x7F800000)).all())


def read(sf: Tensor, blocks: int) -> Tensor:
    """float32 [M, Kb] scales of a tensor in any layout; the exponent bytes 0 and 255 are 2^-127 and NaN."""
    return of_exponents(exponents(sf, blocks)) if sf.dtype == torch.int32 else sf.float()


def block_amax(size: Tensor, block_m: int, block_k: int) -> Tensor:
    """[M, Kb] maxima of the magnitudes [T, H], NaN ignored; blocks cut by an edge use the elements that exist."""
    tokens, hidden = size.shape
    size = torch.where(size.isnan(), 0.0, size)
    size = torch.nn.functional.pad(size, (0, -hidden % block_k, 0, -tokens % block_m))
    return size.unflatten(1, (-1, block_k)).unflatten(0, (-1, block_m)).amax(dim=(1, 3))


def per_element(sf: Tensor, block_m: int, block_k: int, tokens: int, hidden: int) -> Tensor:
    """[T, H] view of one value for each block."""
    sf = sf.repeat_interleave(block_k, dim=1)[:, :hidden]
    return sf if block_m == 1 else sf.repeat_interleave(block_m, dim=0)[:tokens]
