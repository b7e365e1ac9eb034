"""RMSNorm, with the residual stream added before it, quantised for the matrix product behind it."""

from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.layout import address
from tk_serving.operator import Existing, Out, Plan, Quantized, operator
from tk_serving.quant import casting, norms, samples, scales
from tk_serving.quant.formats import FORMATS
from tk_serving.quant.norm_forward import inputs
from tk_serving.workloads import Maker, serving

GROUPS = (32, 128)

_expect = Expect("norm_forward_and_per_token_cast")


def _plan(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None,
    out_scale: float,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    with_out_bf16: bool,
    out: Quantized | None,
    out_bf16: Tensor | None,
    residual_out: Tensor | None,
    mega_moe_sf: Tensor | None,
    mega_moe_block_m: int,
    with_rstd: bool,
) -> Plan:
    _expect.one_of("fmt", fmt, ("e4m3",))
    stream = norms.check(_expect, x, weight, residual, residual_out)
    rows, hidden = tuple(x.shape[:-1]), x.shape[-1]
    _expect.one_of("num_per_channels", num_per_channels, GROUPS)
    ok = hidden % num_per_channels == 0
    _expect.that(ok, "x", f"H that is a multiple of num_per_channels = {num_per_channels}", hidden)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    slots = Out((*rows, hidden), FORMATS[fmt].dtype), norms.sf_out(layout, rows, hidden // num_per_channels)
    plain = Out((*rows, hidden), torch.bfloat16)
    if out is not None:
        for i, slot in enumerate(slots):
            casting.check_given(_expect, f"out[{i}]", out[i], slot)
    if out_bf16 is not None:
        casting.check_given(_expect, "out_bf16", out_bf16, plain)
    if mega_moe_sf is None:
        _expect.that(mega_moe_block_m == 0, "mega_moe_block_m", "0 without mega_moe_sf", mega_moe_block_m)
    else:
        _check_mega(x, mega_moe_sf, mega_moe_block_m, round_sf, num_per_channels)
    _expect.same_device(
        x=x, out_bf16=out_bf16, mega_moe_sf=mega_moe_sf, **({"out[0]": out[0], "out[1]": out[1]} if out else {})
    )
    given = (weight, residual, residual_out, out_bf16, *(out or ())[:1])
    config = norms.forward_config(x, *given) | {
        "weight": weight is not None,
        "residual": residual is not None,
        "with_rstd": with_rstd,
        "out": "bfloat16" if with_out_bf16 or out_bf16 is not None else None,
        "fmt": fmt,
        "npc": num_per_channels,
        "layout": layout,
        "round_sf": round_sf,
        "mega": mega_moe_sf is not None,
    }

    def operands(outputs, x, weight, eps, fmt, npc, residual, out_scale, *_):
        data, sf, plain, rstd, stream = outputs
        numbers = float(eps), float(out_scale), max(1, mega_moe_block_m), _padded(mega_moe_block_m)
        return x, weight, residual, stream, plain, rstd, data, sf, mega_moe_sf, *numbers

    launches = norms.launches("quant.norm", config, x, operands, (x, *given), layout == scales.ROW)
    results = (
        *(slots if out is None else (Existing("out", 0), Existing("out", 1))),
        Existing("out_bf16") if out_bf16 is not None else plain if with_out_bf16 else None,
        Out(rows, torch.float32) if with_rstd else None,
        stream,
    )
    return Plan(results, launches if x.numel() else ())


def _padded(block_m: int) -> int:
    return -(-block_m // 128) * 128


def _mega_rows(tokens: int, block_m: int) -> int:
    """Rows up to the last that a token may use."""
    last = (tokens - 1) % block_m + 1 if tokens <= block_m else block_m
    inner = last // 128 * 128 + min(last % 128 * 4, 128) if last else 0
    return (max(tokens, 1) - 1) // block_m * _padded(block_m) + inner


def _check_mega(x: Tensor, mega: Tensor, block_m: int, round_sf: bool, npc: int) -> None:
    tokens, hidden = x.shape[-2:]
    _expect.that(x.dim() == 2, "mega_moe_sf", "x of shape [T, H]", list(x.shape))
    _expect.that(round_sf, "mega_moe_sf", "round_sf as well", False)
    _expect.that(npc == 32, "num_per_channels", "32 with mega_moe_sf", npc)
    _expect.that(hidden % 128 == 0, "x", "H that is a multiple of 128 with mega_moe_sf", hidden)
    _expect.positive("mega_moe_block_m", block_m)
    _expect.dtype("mega_moe_sf", mega, torch.int32)
    _expect.shape("mega_moe_sf", mega, ("R", hidden // 128))
    _expect.that(mega.stride(0) == 1, "mega_moe_sf", "stride(0) == 1", f"strides {list(mega.stride())}")
    needed = _mega_rows(tokens, block_m)
    columns = mega.shape[1]
    if columns > 1:
        _expect.that(mega.stride(1) >= needed, "mega_moe_sf", f"stride(1) of at least {needed}", mega.stride(1))
    if address(mega):
        room = mega.untyped_storage().nbytes() // 4 - mega.storage_offset()
        needed += (columns - 1) * mega.stride(1)
        _expect.that(room >= needed, "mega_moe_sf", f"storage of {needed} elements", room)


def mega_moe_row(token: Tensor, block_m: int) -> Tensor:
    """Row of the exponents of a token: 128 rows of a block are stored as 32 groups of 4."""
    inner = token % block_m
    block = token.div(block_m, rounding_mode="floor") * _padded(block_m)
    return block + inner // 128 * 128 + inner % 32 * 4 + inner % 128 // 32


def _finish(results, *args):
    x, out, out_bf16, residual_out = args[0], args[11], args[12], args[13]
    data, sf, plain, rstd, stream = results
    if args[5] is None:
        stream = x
    elif residual_out is not None:
        stream = residual_out
    if out_bf16 is None:
        out_bf16 = plain if args[10] else None
    return (data, sf) if out is None else out, out_bf16, rstd if args[16] else None, stream


def _inputs(
    make: Maker,
    *,
    npc: int,
    out_scale: float = 1.0,
    fmt: str = "e4m3",
    column_major: bool = False,
    round_sf: bool = False,
    packed: bool = False,
    with_out_bf16: bool = False,
    out: bool = False,
    mega: int = 0,
    with_rstd: bool = False,
    **operands: Any,
) -> tuple:
    x, weight, eps, residual, residual_out = inputs(make, **operands)
    rows, hidden = x.shape[:-1], x.shape[-1]
    given = mega_sf = None
    if out:
        layout = scales.layout_of(_expect, column_major, round_sf, packed)
        slots = Out(tuple(x.shape), FORMATS[fmt].dtype), norms.sf_out(layout, rows, hidden // npc)
        given = tuple(slot.zeros(make.device) for slot in slots)
    if mega:
        room = -(-rows[0] // mega) * _padded(mega)
        mega_sf = make.randint(0, 99, hidden // 128, room, dtype=torch.int32).t()
    flags = (column_major, round_sf, packed, with_out_bf16)
    return (x, weight, eps, fmt, npc, residual, out_scale, *flags, given, None, residual_out, mega_sf, mega, with_rstd)


@operator(
    spec="operators.md A4",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("out", "out_bf16", "residual_out", "mega_moe_sf"),
    finish=_finish,
    moves_data=True,
    cases=[
        {"tokens": 0, "hidden": 256, "npc": 128, "column_major": True, "batch": 2, "residual": "new"},
        {
            "tokens": 5,
            "hidden": 1152,
            "npc": 128,
            "column_major": True,
            "residual": "alias",
            "with_rstd": True,
            "with_out_bf16": True,
            "out_scale": 0.7,
        },
        {
            "tokens": 67,
            "hidden": 256,
            "npc": 32,
            "column_major": True,
            "round_sf": True,
            "packed": True,
            "residual": "alias",
            "pad": 8,
            "mega": 64,
        },
        {
            "tokens": 3,
            "hidden": 672,
            "npc": 32,
            "dtype": "float32",
            "weighted": False,
            "with_out_bf16": True,
            "batch": 2,
        },
        {
            "tokens": 4,
            "hidden": 1408,
            "npc": 128,
            "column_major": True,
            "round_sf": True,
            "packed": True,
            "out": True,
            "batch": 2,
        },
    ],
    workloads=serving(lambda m: samples.activations(m) | {"residual": "alias"}),
    peers=["vllm", "tile_kernels"],
)
def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: Quantized | None = None,
    out_bf16: Tensor | None = None,
    residual_out: Tensor | None = None,
    mega_moe_sf: Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
) -> tuple[Quantized, Tensor | None, Tensor | None, Tensor]:
    """RMSNorm quantised with one scale for each group of columns: ``per_token_cast`` of ``norm_forward``, bit for bit.

    Args:
        x, weight, eps, residual, out_scale, residual_out, with_rstd: as in ``norm_forward``.
        fmt: ``e4m3``.
        num_per_channels: columns of a group: 32 or 128, a divisor of H.
        use_tma_aligned_col_major_sf: column-major scales, columns on 16 bytes, in each batch.
        round_sf: scales are powers of two.
        use_packed_ue8m0: four exponents in an int32; needs both flags above.
        with_out_bf16: return the norm in bfloat16 as well.
        out: preallocated (data, sf) of the shape, dtype and strides that would be allocated.
        out_bf16: preallocated bfloat16 result; implies ``with_out_bf16``.
        mega_moe_sf: int32 [R, H / 128] with stride(0) == 1: receives the exponents packed in words once more. With
            a = block_m rounded up to 128 and i = t mod block_m, token t goes to row
            t // block_m * a + i // 128 * 128 + i % 32 * 4 + i % 128 // 32. Rows of no token keep their content. Needs
            x of two dimensions, ``round_sf``, groups of 32 and H a multiple of 128. The rows that tokens use lie within
            stride(1), but may lie past R.
        mega_moe_block_m: block_m; exactly with ``mega_moe_sf``.

    Returns:
        ((data, sf), out_bf16 or None, rstd or None, what was normalised): float8_e4m3fn like x; float32
        [..., T, H / npc] or int32 [..., T, ceil(H / npc / 4)].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, group size or combination of arguments.
    """
    result, rstd, stream = norms.normalize(x, weight, eps, residual, out_scale)
    values = result.float().flatten(0, -2)
    amax = casting.amax_of(values, None, 1, num_per_channels)
    sf, inverse = scales.rule(amax, FORMATS[fmt], round_sf)
    data = casting.quantize(values, None, inverse, fmt, 1, num_per_channels).view(x.shape)
    if mega_moe_sf is not None:
        tokens = torch.arange(len(x), device=x.device)
        size = (_mega_rows(len(x), mega_moe_block_m), mega_moe_sf.shape[1])
        target = mega_moe_sf.as_strided(size, mega_moe_sf.stride())
        target[mega_moe_row(tokens, mega_moe_block_m)] = scales.lay_out(sf, scales.PACKED)
    layout = scales.layout_of(_expect, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    laid_out = norms.lay_out(sf.unflatten(0, x.shape[:-1]), layout)
    plain = result.to(torch.bfloat16) if with_out_bf16 or out_bf16 is not None else None
    return (data, laid_out), plain, rstd if with_rstd else None, stream
