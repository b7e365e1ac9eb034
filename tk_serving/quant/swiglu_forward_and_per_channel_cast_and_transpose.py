"""SwiGLU, cast with one scale for each column of a block of rows, transposed."""

import torch
from torch import Tensor

from tk_serving.compare import Steps
from tk_serving.expect import Expect
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.quant import channels
from tk_serving.quant.gating import Rows, activate
from tk_serving.quant.per_channel_cast_and_transpose import TOKENS
from tk_serving.workloads import MODELS, Maker, Workload

_expect = Expect("swiglu_forward_and_per_channel_cast_and_transpose")


def _plan(
    x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool, without_transpose: bool, swiglu_clamp_value: float | None
) -> Plan:
    tokens, width = channels.check(_expect, x, fmt, num_per_tokens, None, (torch.bfloat16,))
    _expect.that(tokens % TOKENS == 0, "x", f"T that is a multiple of {TOKENS}", tokens)
    _expect.that(width % 128 == 0, "x", "2 H columns, H a multiple of 64", width)
    if swiglu_clamp_value is not None:
        _expect.positive("swiglu_clamp_value", swiglu_clamp_value)
    transposed = not without_transpose
    return channels.plan(
        x, tokens, width // 2, num_per_tokens, round_sf, transposed=transposed, swiglu=True, clamp=swiglu_clamp_value
    )


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    npt: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    clamp: float | None = None,
) -> tuple:
    x = make.randn(tokens, 2 * hidden, dtype=torch.bfloat16, scale=2.0)
    return x, "e4m3", npt, round_sf, without_transpose, clamp


@operator(
    spec="operators.md P14",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=Steps(),
    cases=[
        {"tokens": 0, "hidden": 64, "npt": 128},
        {"tokens": 144, "hidden": 192, "npt": 128, "clamp": 1.5},
        {"tokens": 48, "hidden": 64, "npt": 32, "round_sf": True, "without_transpose": True},
    ],
    workloads=[
        Workload(
            f"{m.name}-fine-tuning",
            {"hidden": m.moe_intermediate_size, "npt": m.quant_group, "clamp": m.swiglu_limit},
            (4096, 8192),
            m.key,
        )
        for m in MODELS
    ],
)
def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
) -> Quantized:
    """silu(gate) * up of the halves of x, rounded to bfloat16, as ``per_channel_cast_and_transpose`` quantises it.

    Args:
        x: bfloat16 [T, 2 H], row-strided, T a multiple of 16, H of 64; gate is the left half.
        fmt: ``e4m3``.
        num_per_tokens: rows of a block: 32 or 128. The last block may be short.
        round_sf: scales are powers of two.
        without_transpose: data as [T, H].
        swiglu_clamp_value: gate at most c, up in [-c, c].

    Returns:
        (data, sf): float8_e4m3fn [H, T] or [T, H]; float32 [ceil(T / num_per_tokens), H].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or block size.
    """
    y, _ = activate(x, Rows(clamp=swiglu_clamp_value))
    data, sf = channels.cast(y.to(torch.bfloat16).float(), num_per_tokens, round_sf)
    if not without_transpose:
        data = data.view(torch.uint8).t().contiguous().view(data.dtype)
    return data, sf
