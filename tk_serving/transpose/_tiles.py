"""What the two transposes share: checks, launch, inputs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.expect import Expect, short
from tk_serving.layout import WORD, aligned
from tk_serving.operator import Launch, Out, Plan
from tk_serving.workloads import Maker

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def plan(expect: Expect, x: Tensor, sizes: Sequence[str]) -> Plan:
    """Check ``x`` against the named sizes and plan the transpose of its last two."""
    expect.kind(x.dtype.itemsize in _INTEGERS, "x", "a dtype of 1, 2 or 4 bytes", short(x.dtype))
    expect.shape("x", x, sizes)
    dense = x.stride(-1) == 1 or x.shape[-1] <= 1
    expect.that(dense, "x", "stride(-1) == 1", f"strides {list(x.stride())}")
    *batch, m, n = x.shape
    out = Out((*batch, n, m), x.dtype)
    launch = Launch("transpose.transpose", {"itemsize": x.dtype.itemsize}, _arguments)
    return Plan((out,), (launch,) if math.prod(x.shape) else ())


def matrices(make: Maker, shape: tuple[int, ...], dtype: str, pad: int) -> Tensor:
    """Random bytes of that dtype; every row is followed by ``pad`` elements that do not belong to it."""
    *outer, n = shape
    wanted = getattr(torch, dtype)
    integer = _INTEGERS[wanted.itemsize]
    info = torch.iinfo(integer)
    return make.randint(info.min, info.max, *outer, n + pad, dtype=integer).view(wanted)[..., :n]


def _arguments(out: Sequence[Tensor], x: Tensor) -> tuple:
    integer = _INTEGERS[x.dtype.itemsize]
    y = out[0].view(integer)
    if x.dim() == 2:
        x, y = x.unsqueeze(0), y.unsqueeze(0)
    # One column may come with any last stride.
    x = x.view(integer).as_strided(x.shape, (*x.stride()[:2], 1))
    per_word = WORD // x.itemsize
    wide_in = aligned(x) and x.shape[2] % per_word == 0
    wide_out = aligned(y) and y.shape[2] % per_word == 0
    return x, y, int(wide_in), int(wide_out)
