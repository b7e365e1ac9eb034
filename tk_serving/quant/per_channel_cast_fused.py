"""Gathered rows, cast with one scale for each column of a block of rows."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.quant import channels, samples
from tk_serving.workloads import MODELS, Maker, Workload

_expect = Expect("per_channel_cast_fused")


def _plan(
    x: Tensor | Quantized,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    num_per_channels: int | None,
    pos_to_token: Tensor | None,
) -> Plan:
    rows, hidden = channels.check(_expect, x, fmt, num_per_tokens, num_per_channels)
    if pos_to_token is not None:
        (rows,) = _expect.tensor("pos_to_token", pos_to_token, torch.int32, ("N",))
        _expect.same_device(x=x if isinstance(x, Tensor) else x[0], pos_to_token=pos_to_token)
    return channels.plan(
        x, rows, hidden, num_per_tokens, round_sf, num_per_channels=num_per_channels, positions=pos_to_token
    )


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    source: str = "bfloat16",
    npc: int | None = None,
    npt: int = 128,
    round_sf: bool = False,
    topk: int = 0,
    gaps: bool = True,
    values: str = "normal",
) -> tuple:
    x = samples.cast_input(make, tokens, hidden, source, (1, npc) if npc else None, values=values)
    positions = None
    if topk:
        positions = make.randint(-1 if gaps else 0, tokens + (1 if gaps else 0), tokens * topk, dtype=torch.int32)
    return x, "e4m3", npt, round_sf, npc, positions


@operator(
    spec="operators.md P11",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "hidden": 64, "topk": 2},
        {"tokens": 45, "hidden": 144, "topk": 3, "values": "special"},
        {"tokens": 20, "hidden": 208, "source": "e4m3", "npc": 128, "topk": 7, "round_sf": True, "values": "special"},
        {"tokens": 9, "hidden": 176, "source": "e4m3", "npc": 128},
    ],
    workloads=[
        Workload(
            f"{m.name}-fine-tuning",
            {"hidden": m.hidden_size, "source": "e4m3", "npc": 128, "topk": m.num_experts_per_tok, "gaps": False},
            (4096, 8192),
            m.key,
        )
        for m in MODELS
    ],
    peers=["tile_kernels"],
)
def per_channel_cast_fused(
    x: Tensor | Quantized,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
) -> Quantized:
    """``per_channel_cast`` of the rows ``x[pos_to_token]``, which are not stored in between.

    Args:
        x: bfloat16 or float32 [T, H], row-strided, H a multiple of 16; or a pair of float8_e4m3fn [T, H] and float32
            [T, ceil(H / npc)], which is dequantised first.
        fmt: ``e4m3``.
        num_per_tokens: rows of a block: 32 or 128. The last block may be short.
        round_sf: scales are powers of two.
        num_per_channels: npc, 32 or 128; exactly if x is a pair.
        pos_to_token: int32 [N], row of x for each row of the result; out of range gives a row of zeros. By default
            all rows in their order.

    Returns:
        (data, sf): float8_e4m3fn [N, H]; float32 [ceil(N / num_per_tokens), H].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or block size.
    """
    values = channels.values_of(x, num_per_channels)
    if pos_to_token is not None:
        known = (pos_to_token >= 0) & (pos_to_token < len(values))
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))  # a row of zeros
        values = values[torch.where(known, pos_to_token, len(values) - 1).long()]
    return channels.cast(values, num_per_tokens, round_sf)
