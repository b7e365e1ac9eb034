"""SwiGLU between the two matrix products of an expert or of a dense layer."""

from typing import Any

import torch
from torch import Tensor

from tk_serving.compare import BITWISE, Steps
from tk_serving.expect import Expect
from tk_serving.operator import Out, Plan, operator
from tk_serving.quant import gating, scales
from tk_serving.quant.cast_back import TARGETS
from tk_serving.workloads import Maker, Model, serving, variants

_expect = Expect("swiglu_forward")
_names = {"row_weights": "topk_weights", "psum": "psum_num_tokens_per_expert", "clamp": "clamp_value"}


def _plan(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    clamped_count: Tensor | None,
    round_activation: bool,
) -> Plan:
    _expect.one_of("fmt", fmt, tuple(TARGETS))
    rows = _rows(psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value, clamped_count)
    n, hidden = rows.check(_expect, x, 8, _names)
    rows.check_counts(_expect, 4, "clamp_value")
    gating.check_rounding(_expect, x, round_activation)
    dtype = str(TARGETS[fmt]).removeprefix("torch.")
    launch = gating.launch(x, rows, _rows_of, dtype, 0, scales.ROW, False, 0.0, rounded=round_activation, lean=True)
    return Plan((Out((n, hidden), TARGETS[fmt]),), (launch,) if n else ())


def _rows(
    psum: Tensor | None, weights: Tensor | None, factor: float | None, clamp: float | None, counts: Tensor | None
) -> gating.Rows:
    return gating.Rows(psum=psum, row_weights=weights, factor=factor, clamp=clamp, counts=counts)


def _rows_of(x: Tensor, fmt: str, *arguments: Any) -> gating.Rows:
    return _rows(*arguments[:5])


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    fmt: str = "bf16",
    dtype: str = "bfloat16",
    psum: tuple[int, ...] = (),
    weighted: bool = False,
    factor: float | None = None,
    clamp: float | None = None,
    counted: bool = False,
    rounded: bool = False,
) -> tuple:
    x = make.randn(tokens, 2 * hidden, dtype=getattr(torch, dtype), scale=2.0)
    intervals = make.value(torch.tensor(psum, dtype=torch.int32)) if psum else None
    counts = make.value(torch.tensor([5, 0, 2**40, 1])) if counted else None
    return x, fmt, intervals, make.rand(tokens) if weighted else None, factor, clamp, counts, rounded


def _engine_forms(model: Model) -> list[dict[str, object]]:
    """vLLM rounds silu to bfloat16 before it multiplies."""
    if model.quant_group == 32:
        return []
    return [{"hidden": model.moe_intermediate_size, "clamp": model.swiglu_limit, "rounded": True}]


@operator(
    spec="operators.md A10",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=(Steps(), BITWISE),
    mutates=("clamped_count",),
    cases=[
        {"tokens": 0, "hidden": 256},
        {"tokens": 5, "hidden": 1096, "dtype": "float32", "fmt": "fp32", "factor": 2.5},
        {
            "tokens": 150,
            "hidden": 72,
            "psum": (3, 131, 131),
            "weighted": True,
            "factor": 1.5,
            "clamp": 0.5,
            "counted": True,
        },
        {"tokens": 4, "hidden": 520, "clamp": 1.0},
        {"tokens": 5, "hidden": 520, "weighted": True, "rounded": True},
    ],
    workloads=serving(lambda m: {"hidden": m.moe_intermediate_size, "clamp": m.swiglu_limit}),
    variants=variants(_engine_forms),
    peers=["vllm", "tile_kernels"],
)
def swiglu_forward(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    round_activation: bool = False,
) -> Tensor:
    """silu(gate) * up of the halves of x, in float32, weighted, rounded once to the target unless asked otherwise.

    Args:
        x: bfloat16 or float32 [N, 2 H], contiguous, H a multiple of 8; gate is the left half.
        fmt: ``bf16`` or ``fp32``.
        psum_num_tokens_per_expert: int32 [E]; expert e owns the rows from psum[e - 1], rounded up to the alignment
            (``config.get_token_alignment``), to psum[e]. Rows of no expert are padding: zeros, not counted.
        topk_weights: float32 [N], multiplies the rows.
        routed_scaling_factor: multiplies the weights, in float32.
        clamp_value: gate at most c, up in [-c, c].
        clamped_count: int64 [4]; the numbers of gate values above c, up values above c, up values below -c, and of all
            elements of rows that are not padding, are added. Needs ``clamp_value``.

        round_activation: silu(gate) and its product with up are rounded to bfloat16, as by vLLM; needs bfloat16 x.

    Returns:
        bfloat16 or float32 [N, H].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or combination of arguments.
    """
    rows = _rows(psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value, clamped_count)
    y, _ = gating.activate(x, rows, round_activation)
    return y.to(TARGETS[fmt])
