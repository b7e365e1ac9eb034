"""FP4 weights that an engine has repacked for Marlin as FP8 weights with blocks of 128 x 128: the same values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.operator import Existing, Launch, Out, Plan, Quantized, operator
from tk_serving.quant import marlin
from tk_serving.quant.formats import decode_e2m1, encode_e4m3
from tk_serving.quant.per_block_cast_lossless import RAISE, REACH
from tk_serving.workloads import MODELS, Maker, Workload

BLOCK = 128

_expect = Expect("per_block_cast_lossless_from_marlin")


def _plan(x: Quantized, out_sf: Tensor, out: Tensor | None) -> Plan:
    data, sf = x
    experts, tiles, words = _expect.tensor("x[0]", data, torch.int32, ("E", "K / 16", "2 N"))
    n, k = words // 2, tiles * marlin.TILE_K
    _expect.that(words % (2 * BLOCK) == 0 and n > 0, "x[0]", f"2 N with N a multiple of {BLOCK}", words)
    _expect.that(k % BLOCK == 0 and k > 0, "x[0]", f"K / 16 with K a multiple of {BLOCK}", tiles)
    _expect.tensor("x[1]", sf, torch.uint8, (experts, k // marlin.GROUP, n))
    _expect.tensor("out_sf", out_sf, torch.float32, (experts, n // BLOCK, k // BLOCK))
    result: Out | Existing = Out((experts, n, k), torch.float8_e4m3fn)
    if out is not None:
        _expect.same("out", out, (experts, n, k), torch.float8_e4m3fn)
        result = Existing("out")
    _expect.same_device(**{"x[0]": data, "x[1]": sf}, out_sf=out_sf, out=out)
    config = {"n": n, "k": k, "aligned": aligned(data, sf, out)}
    launch = Launch("quant.per_block_cast_lossless_from_marlin", config, _arguments)
    return Plan((result,), (launch,) if experts else ())


def _arguments(outputs: Sequence[Tensor], x: Quantized, out_sf: Tensor, out: Tensor | None) -> tuple:
    return *x, out_sf, outputs[0]


def _finish(flat: Tensor, x: Quantized, out_sf: Tensor, out: Tensor | None) -> Tensor:
    return flat if out is None else out


def _verify(x: Quantized, out_sf: Tensor, out: Tensor | None) -> None:
    data, sf = x
    _expect.that(torch.equal(out_sf, marlin.block_scales(sf, RAISE)), "out_sf", "2^-6 times the largest", "others")
    _expect.that(exact(data, sf), "x[1]", f"scales within 2^{REACH} of the largest in a block", "a wider range")


def exact(data: Tensor, sf: Tensor) -> bool:
    """Whether blocks of 128 x 128 in FP8 hold a weight exactly: its scales are within 2^14 of the largest of the block.

    Scales of groups that hold only zeros do not count. Reads the result on the host.

    Args:
        data: int32 [E, K / 16, 2 N], codes in Marlin's layout.
        sf: uint8 [E, K / 32, N], their exponents.
    """
    least, most = marlin.extreme_exponents(sf, BLOCK)
    wide = (most - least > REACH).flatten(1).any(dim=1)
    return all(_exact_codes(data[e], sf[e], most[e]) for e in wide.nonzero()[:, 0].tolist())


def _exact_codes(data: Tensor, sf: Tensor, most: Tensor) -> bool:
    """Of one expert: whether the groups with scales too small hold only zeros."""
    lowest = (most - REACH).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK // marlin.GROUP, 1)
    outside = marlin.unpack_exponents(sf).to(torch.int32) < lowest
    held = (marlin.unpack_codes(data).view(torch.uint8) & 0x77).unflatten(-1, (-1, marlin.GROUP // 2)).any(dim=-1)
    return not bool((outside & held).any())


def _inputs(
    make: Maker, *, tokens: int, n: int, k: int, spread: int = REACH, lowest: int = 110, preallocated: bool = False
) -> tuple:
    """``tokens`` experts with exponents from ``lowest`` to ``lowest + spread``."""
    data = make.randint(-(2**31), 2**31, tokens, k // marlin.TILE_K, 2 * n, dtype=torch.int32)
    sf = make.randint(lowest, lowest + spread + 1, tokens, k // marlin.GROUP, n, dtype=torch.uint8)
    out_sf = make.value(marlin.block_scales(sf, RAISE))
    out = make.value(torch.zeros(tokens, n, k).to(torch.float8_e4m3fn)) if preallocated else None
    return (data, sf), out_sf, out


def _experts() -> list[Workload]:
    """Both weights of one expert and of sixteen."""
    return [
        Workload(f"{m.name}-{name}", {"n": n, "k": k}, (1, 16), m.key)
        for m in MODELS
        if m.scoring_func == "sqrtsoftplus"
        for name, n, k in (
            ("gate-up", 2 * m.moe_intermediate_size, m.hidden_size),
            ("down", m.hidden_size, m.moe_intermediate_size),
        )
    ]


@operator(
    spec="operators.md P7, input in Marlin's layout",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    finish=_finish,
    verify=_verify,
    mutates=["out"],
    equality=BITWISE,
    cases=[
        {"tokens": 0, "n": 128, "k": 128},
        {"tokens": 2, "n": 128, "k": 256},
        {"tokens": 1, "n": 256, "k": 384, "spread": 30, "preallocated": True},
        {"tokens": 1, "n": 128, "k": 128, "lowest": 0, "spread": 8},
    ],
    workloads=_experts(),
)
def per_block_cast_lossless_from_marlin(x: Quantized, out_sf: Tensor, out: Tensor | None = None) -> Tensor:
    """FP4 weights in Marlin's layout as FP8 weights in rows with blocks of 128 x 128: the same values, exactly.

    The result of ``per_block_cast_lossless`` on the weights before they were repacked. Exact where every group of 32
    with a non-zero code has a scale within 2^14 of the largest of its block (:func:`exact`); smaller ones are rounded
    to nearest even.

    Args:
        x: (data, sf) of E weights [N, K], N and K multiples of 128, laid out as :mod:`tk_serving.quant.marlin` says.
            data: int32 [E, K / 16, 2 N], e2m1 codes. sf: uint8 [E, K / 32, N], biased exponents of the 1 x 32 scales.
        out_sf: float32 [E, N / 128, K / 128], the scales of the result, from
            :func:`tk_serving.quant.marlin.block_scales`; computed once when the weights are loaded.
        out: preallocated result.

    Returns:
        float8_e4m3fn [E, N, K].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or layout.
    """
    data, sf = x
    codes = decode_e2m1(marlin.unpack_codes(data))
    shift = marlin.unpack_exponents(sf).to(torch.int32).repeat_interleave(marlin.GROUP, dim=-1)
    e_out = out_sf.view(torch.int32) >> 23 & 255
    shift -= e_out.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    # ldexp in float64: a shift may lie outside of the exponents of float32.
    return encode_e4m3(torch.ldexp(codes.double(), shift).float())
