"""Expert-major rows added up in token order, together with the output of the shared expert."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.moe import _combining, _contents, _fused
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("reduce_fused_add")


def _plan(
    x: Tensor | Quantized,
    shared: Tensor,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    out: Tensor | None,
) -> Plan:
    return _combining.plan(
        _expect,
        _arguments,
        x=x,
        topk_weights=topk_weights,
        token_topk_to_pos=token_topk_to_pos,
        dtype=None,
        sf=None,
        shared=shared,
        out=out,
    )


def _arguments(
    outputs: Sequence[Tensor],
    x: Tensor | Quantized,
    shared: Tensor,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    out: Tensor | None,
) -> tuple:
    return _combining.arguments(outputs[0], x, topk_weights, token_topk_to_pos, shared=shared)


def _finish(flat: Tensor, *arguments: object) -> object:
    return flat if arguments[4] is None else arguments[4]


def _traffic(x: Tensor | Quantized, shared: Tensor, weights: Tensor | None, positions: Tensor, _: object) -> int:
    return _combining.traffic(x, positions, _combining.split(x)[0].element_size(), weights, shared)


def _verify(
    x: Tensor | Quantized, shared: Tensor, weights: Tensor | None, token_topk_to_pos: Tensor, _: object
) -> None:
    _contents.below(_expect, "token_topk_to_pos", token_topk_to_pos, len(_combining.split(x)[0]))


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    topk: int,
    experts: int = 8,
    alignment: int = 4,
    dtype: str = "bfloat16",
    weighted: bool = True,
    x_sf: bool = False,
    preallocated: bool = False,
) -> tuple:
    x, weights, positions = _combining.inputs(
        make,
        tokens=tokens,
        hidden=hidden,
        topk=topk,
        experts=experts,
        alignment=alignment,
        dtype=dtype,
        x_sf=x_sf,
    )
    return (
        *(x, make.randn(tokens, hidden, dtype=torch.bfloat16), weights if weighted else None, positions),
        make.value(torch.ones(tokens, hidden, dtype=getattr(torch, dtype))) if preallocated else None,
    )


@operator(
    spec="operators.md P28, with one more addend",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    traffic=_traffic,
    verify=_verify,
    finish=_finish,
    mutates=["out"],
    moves_data=True,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "hidden": 64, "topk": 2},
        {"tokens": 9, "hidden": 1024, "topk": 8, "experts": 16},
        {"tokens": 9, "hidden": 40, "topk": 2, "dtype": "float32", "weighted": False, "preallocated": True},
        {"tokens": 7, "hidden": 320, "topk": 3, "x_sf": True},
    ],
    workloads=serving(
        lambda m: {
            "hidden": m.hidden_size,
            "topk": m.num_experts_per_tok,
            "experts": m.n_routed_experts,
            "alignment": 128,
        }
    ),
    peers=["vllm"],
)
def reduce_fused_add(
    x: Tensor | Quantized,
    shared: Tensor,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Add up the rows of every token, weighted, and the output of the shared expert.

    As :func:`reduce_fused`; ``shared`` is added to the float32 sum before the one rounding to the result's dtype.

    Args:
        x: bfloat16 or float32 [N, H], rows may be strided, H a multiple of 8; or such a tensor or a float8_e4m3fn one
            together with a float32 [N] scale of every row.
        shared: bfloat16 or float32 [T, H], rows may be strided.
        topk_weights: float32 [T, K], or None for weights of 1.
        token_topk_to_pos: int32 [T, K]; positions outside [0, N) are skipped.
        out: preallocated result; may be ``shared`` itself.

    Returns:
        [T, H] in the dtype of the data.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or combination.
    """
    data, x_sf = _combining.split(x)
    return _fused.rounded(_fused.combine(data, x_sf, topk_weights, token_topk_to_pos, shared), data.dtype)
