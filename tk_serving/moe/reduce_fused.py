"""Expert-major rows added up in token order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.moe import _combining, _contents, _fused
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.workloads import Maker, Model, serving, variants

_expect = Expect("reduce_fused")


def _plan(
    x: Tensor | Quantized,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str,
    sf: Tensor | None,
    out: Tensor | None,
) -> Plan:
    _expect.one_of("fp8_format", fp8_format, ("", "e4m3"))
    _expect.that(sf is None or fp8_format == "e4m3", "sf", "None unless fp8_format is 'e4m3'", "a tensor")
    return _combining.plan(
        _expect,
        _arguments,
        x=x,
        topk_weights=topk_weights,
        token_topk_to_pos=token_topk_to_pos,
        dtype=torch.float8_e4m3fn if fp8_format else None,
        sf=sf,
        shared=None,
        out=out,
    )


def _arguments(
    outputs: Sequence[Tensor],
    x: Tensor | Quantized,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str,
    sf: Tensor | None,
    out: Tensor | None,
) -> tuple:
    return _combining.arguments(outputs[0], x, topk_weights, token_topk_to_pos, sf)


def _finish(flat: Tensor, *arguments: object) -> object:
    return flat if arguments[5] is None else arguments[5]


def _traffic(
    x: Tensor | Quantized, weights: Tensor | None, positions: Tensor, fp8_format: str, sf: Tensor | None, _: object
) -> int:
    out_size = 1 if fp8_format else _combining.split(x)[0].element_size()
    return _combining.traffic(x, positions, out_size, weights, sf)


def _verify(x: Tensor | Quantized, topk_weights: Tensor | None, token_topk_to_pos: Tensor, *_: object) -> None:
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
    fp8: bool = False,
    sf: float | None = None,
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
        *(x, weights if weighted else None, positions),
        "e4m3" if fp8 else "",
        None if sf is None else make.value(torch.tensor([sf])),
        make.value(torch.ones(tokens, hidden, dtype=getattr(torch, dtype))) if preallocated else None,
    )


def _engine_forms(model: Model) -> list[dict[str, object]]:
    """Behind experts whose second product has applied the weights: without any, or with SGLang's scaling factor in
    their place; shared experts among the routed ones. Behind DeepGEMM the factor is a scale of every row."""
    sizes, topk = {"hidden": model.hidden_size}, model.num_experts_per_tok
    return [
        {**sizes, "topk": topk, "weighted": False},
        {**sizes, "topk": topk + model.n_shared_experts},
        {**sizes, "topk": topk, "x_sf": True},
    ]


@operator(
    spec="operators.md P28",
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
        {"tokens": 7, "hidden": 320, "topk": 3, "x_sf": True, "fp8": True, "sf": 700.0},
        {"tokens": 5, "hidden": 256, "topk": 11, "experts": 12, "dtype": "float8_e4m3fn", "x_sf": True},
    ],
    workloads=serving(
        lambda m: {
            "hidden": m.hidden_size,
            "topk": m.num_experts_per_tok,
            "experts": m.n_routed_experts,
            "alignment": 128,
        }
    ),
    variants=variants(_engine_forms),
    peers=["vllm", "sglang"],
)
def reduce_fused(
    x: Tensor | Quantized,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add up the rows of every token, weighted: the way back from ``expand_to_fused``.

    In float32, for k ascending with one rounding of ``row * (weight * x_sf) + sum``; a token without positions gives
    zeros. The result is rounded to nearest even, and saturates for e4m3.

    Args:
        x: bfloat16 or float32 [N, H], rows may be strided, H a multiple of 8; or such a tensor or a float8_e4m3fn one
            together with a float32 [N] scale of every row.
        topk_weights: float32 [T, K], or None for weights of 1.
        token_topk_to_pos: int32 [T, K]; positions outside [0, N) are skipped.
        fp8_format: ``e4m3`` for a float8_e4m3fn result; by default it has the dtype of the data.
        sf: float32 [1], with ``e4m3`` only: multiplies the sums before they are rounded.
        out: preallocated result.

    Returns:
        [T, H].

    Raises:
        TypeError: dtype.
        ValueError: wrong shape, layout or combination.
    """
    data, x_sf = _combining.split(x)
    acc = _fused.combine(data, x_sf, topk_weights, token_topk_to_pos)
    return _fused.rounded(acc if sf is None else acc * sf, torch.float8_e4m3fn if fp8_format else data.dtype)
