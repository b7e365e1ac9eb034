"""Cast with one scale for each column of a block of rows, transposed."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.quant import channels, samples
from tk_serving.workloads import MODELS, Maker, Workload

TOKENS = 16  # divide T: bytes of a word of a transposed row

_expect = Expect("per_channel_cast_and_transpose")


def _plan(x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool) -> Plan:
    tokens, hidden = channels.check(_expect, x, fmt, num_per_tokens, None, (torch.bfloat16,))
    _expect.that(tokens % TOKENS == 0, "x", f"T that is a multiple of {TOKENS}", tokens)
    return channels.plan(x, tokens, hidden, num_per_tokens, round_sf, transposed=True)


def _inputs(
    make: Maker, *, tokens: int, hidden: int, npt: int, round_sf: bool = False, values: str = "normal", pad: int = 0
) -> tuple:
    return samples.matrix(make, tokens, hidden, torch.bfloat16, values, pad), "e4m3", npt, round_sf


@operator(
    spec="operators.md P12",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "hidden": 64, "npt": 128},
        {"tokens": 144, "hidden": 208, "npt": 128, "values": "special", "pad": 8},
        {"tokens": 176, "hidden": 144, "npt": 32, "round_sf": True, "values": "special"},
    ],
    workloads=[
        Workload(f"{m.name}-fine-tuning", {"hidden": m.hidden_size, "npt": m.quant_group}, (4096, 8192), m.key)
        for m in MODELS
    ],
)
def per_channel_cast_and_transpose(x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False) -> Quantized:
    """``per_channel_cast`` with transposed data.

    Args:
        x: bfloat16 [T, H], row-strided, T and H multiples of 16.
        fmt: ``e4m3``.
        num_per_tokens: rows of a block: 32 or 128. The last block may be short.
        round_sf: scales are powers of two.

    Returns:
        (data, sf): float8_e4m3fn [H, T]; float32 [ceil(T / num_per_tokens), H].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or block size.
    """
    data, sf = channels.cast(x.float(), num_per_tokens, round_sf)
    return data.view(torch.uint8).t().contiguous().view(data.dtype), sf
