"""Element-wise cast to bfloat16 or float8_e4m3fn, to nearest or stochastically."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect, short
from tk_serving.layout import address
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.quant import rand
from tk_serving.quant.formats import encode_e4m3
from tk_serving.quant.rounding import stochastic
from tk_serving.workloads import Maker, serving

TARGETS = {torch.float32: (torch.bfloat16, torch.float8_e4m3fn), torch.bfloat16: (torch.float8_e4m3fn,)}

_expect = Expect("cast")


def _plan(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool, seed: int | None) -> Plan:
    _expect.dtype("x", x, *TARGETS)
    targets = TARGETS[x.dtype]
    expected = f"{' or '.join(map(str, targets))} for {short(x.dtype)} values"
    _expect.kind(dtype in targets, "dtype", expected, dtype)
    _expect.that(x.is_contiguous(), "x", "a contiguous tensor", f"strides {list(x.stride())}")
    config = {"x": short(x.dtype), "out": short(dtype), "stochastic": stochastic_rounding}
    config["aligned"] = address(x) % 16 == 0

    def arguments(outputs: Sequence[Tensor], x: Tensor, *_: object) -> tuple:
        state = rand.next_state(x.device, seed) if stochastic_rounding else None
        return x.view(-1), state, outputs[0].view(-1)

    # Behind the kernels of torch that give the state, which do not use it, an early launch takes longer.
    launch = Launch("quant.cast", config, arguments, pdl=False)
    return Plan((Out(tuple(x.shape), dtype),), (launch,) if x.numel() else ())


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    out: str,
    source: str = "float32",
    stochastic: bool = False,
    values: str = "normal",
) -> tuple:
    x = make.randn(tokens, hidden, dtype=getattr(torch, source), scale=100.0 if out == "float8_e4m3fn" else 1.0)
    if values == "special":
        size = torch.exp2(make.randint(-149, 128, tokens, hidden, dtype=torch.float32))
        wide = (size * make.randn(tokens, hidden)).to(x.dtype)
        rare = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 448.0, 3.4e38, 2.0**-9, 2.0**-6])
        wide.view(-1)[: rare.numel()] = rare.to(wide)
        x = torch.where(make.rand(tokens, hidden) < 0.5, x, wide)
        x.view(-1)[: rare.numel()] = rare.to(x)
    return make.value(x), getattr(torch, out), stochastic, 7 if stochastic else None


@operator(
    spec="operators.md A7",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "hidden": 64, "out": "bfloat16"},
        {"tokens": 3, "hidden": 1003, "out": "bfloat16", "values": "special"},
        {"tokens": 5, "hidden": 512, "out": "float8_e4m3fn", "source": "bfloat16", "values": "special"},
        {"tokens": 9, "hidden": 517, "out": "bfloat16", "stochastic": True, "values": "special"},
        {"tokens": 9, "hidden": 517, "out": "float8_e4m3fn", "stochastic": True, "values": "special"},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size, "out": "bfloat16", "stochastic": True}),
)
def cast(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool = False, *, seed: int | None = None) -> Tensor:
    """Round every element to a narrower type, to nearest even or stochastically.

    Stochastic rounding takes the larger of the two neighbours with a probability equal to the fraction, so that the
    mean of many casts is the value; exact values stay. Casts to float8_e4m3fn saturate at 448.

    Args:
        x: float32 or bfloat16, contiguous, of any shape.
        dtype: bfloat16 (from float32) or float8_e4m3fn.
        stochastic_rounding: draws the next random bits of the device; see ``quant.rand.set_seed``.
        seed: of the random bits of this call alone.

    Returns:
        A tensor of the shape of x.

    Raises:
        TypeError: a dtype or a pair of dtypes that is not supported.
        ValueError: x is not contiguous.
    """
    if not stochastic_rounding:
        return encode_e4m3(x.float()) if dtype == torch.float8_e4m3fn else x.to(dtype)
    random = rand.random_bits(rand.next_state(x.device, seed), x.numel()).view(x.shape)
    if dtype == torch.bfloat16:
        return stochastic(x, random, "bfloat16").to(dtype)
    return encode_e4m3(stochastic(x.float(), random, "e4m3"))
