"""Products of FP8 activations and FP4 weights, grouped by expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tk_serving.compare import Diff
from tk_serving.expect import Expect
from tk_serving.gemm import tiles
from tk_serving.layout import aligned
from tk_serving.moe.get_fused_mapping import capacity, get_fused_mapping
from tk_serving.operator import Existing, Launch, Out, Plan, Quantized, operator
from tk_serving.workloads import MODELS, PHASES, Maker, Workload

GROUP = 128  # channels that share a scale of the activations
MAX_EXPERTS, MAX_M = 512, 2**19

_expect = Expect("grouped_gemm_fp8_fp4")


@dataclass(frozen=True)
class Shape:
    """A variant of the kernel.

    Attributes:
        width: rows of activations in a tile.
        step: tiles with fewer rows take so many columns less; 0: all take the same time.
        subtiles: times 128 rows of weights in a tile.
        stages: how many slices of 128 channels are under way.
        loaders: threads that load; two groups of 128 multiply.
        blocks: of a multiprocessor.
        up_to: for so many rows of an expert, expected.
    """

    width: int
    step: int
    subtiles: int
    stages: int
    loaders: int
    blocks: int
    up_to: float

    @property
    def config(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("width", "step", "subtiles", "stages", "loaders", "blocks")}


SHAPES = (
    Shape(8, 0, 1, 9, 32, 2, 4),
    Shape(64, 8, 2, 7, 128, 1, 64),
    Shape(112, 0, 2, 5, 128, 1, float("inf")),
)
"""By rows of an expert; measured on an H200 (docs/records/tuning.md)."""

HALF = (Shape(64, 8, 1, 9, 128, 1, float("inf")),)
"""Instead of those with two subtiles, where the rows of weights are no multiple of 256."""


def shape_for(rows: float, m: int) -> Shape:
    """The variant for so many rows of an expert and ``m`` rows of weights."""
    fitting = [shape for shape in SHAPES if m % (128 * shape.subtiles) == 0]
    return next(shape for shape in (*fitting, *HALF) if rows <= shape.up_to)


def expected_rows(rows: int, experts: int, alignment: int = 8) -> float:
    """Rows of an expert, on average, of an activation tensor with room for every choice of experts."""
    pairs = rows - experts * (alignment - 1) if rows >= experts * alignment else rows / alignment
    return max(pairs, 1) / experts


def _plan(
    x: Quantized,
    weight: Quantized,
    expert_start: Tensor,
    num_tokens_per_expert: Tensor,
    rows_per_expert: float | None,
    out: Tensor | None,
) -> Plan:
    (data, sf), (w, w_sf) = x, weight
    rows, k = _expect.tensor("x[0]", data, torch.float8_e4m3fn, ("N", "K"))
    _expect.multiple("x[0]", k, GROUP, "K")
    experts, nb, kb, _ = _expect.tensor("weight[0]", w, torch.uint8, ("E", "M / 64", k // GROUP, tiles.TILE))
    m = nb * tiles.ROWS
    _expect.that(m % 128 == 0, "weight[0]", "M / 64 with M a multiple of 128", nb)
    _expect.between("weight[0]", experts, 1, MAX_EXPERTS)
    _expect.between("weight[0]", nb, 1, MAX_M // tiles.ROWS)
    _expect.tensor("weight[1]", w_sf, torch.float32, (experts, m))
    _expect.dtype("x[1]", sf, torch.float32)
    _expect.shape("x[1]", sf, (rows, kb))
    _expect.that(_by_columns(sf), "x[1]", "column-major scales", f"strides {list(sf.stride())}")
    for name, tensor in (("expert_start", expert_start), ("num_tokens_per_expert", num_tokens_per_expert)):
        _expect.tensor(name, tensor, torch.int32, (experts,))
    if rows_per_expert is not None:
        _expect.positive("rows_per_expert", rows_per_expert)
    result: Out | Existing = Out((rows, m), torch.bfloat16)
    if out is not None:
        _expect.same("out", out, (rows, m), torch.bfloat16)
        result = Existing("out")
    tensors = {"x[0]": data, "x[1]": sf, "weight[0]": w, "weight[1]": w_sf}
    _expect.same_device(**tensors, expert_start=expert_start, num_tokens_per_expert=num_tokens_per_expert, out=out)
    for name, wide in {"x[0]": data, "weight[0]": w, "out": out}.items():
        _expect.that(wide is None or aligned(wide.view(-1)), name, "a 16-byte aligned tensor", "a misaligned one")
    shape = shape_for(expected_rows(rows, experts) if rows_per_expert is None else rows_per_expert, m)
    arguments = functools.partial(_arguments, shape.blocks)
    launch = Launch("gemm.grouped_gemm_fp8_fp4", shape.config, arguments, archs=("sm_90a",))
    return Plan((result,), (launch,) if rows else ())


def _by_columns(sf: Tensor) -> bool:
    rows, columns = sf.shape
    return (rows <= 1 or sf.stride(0) == 1) and (columns <= 1 or sf.stride(1) >= rows)


def _arguments(
    blocks: int,
    outputs: Sequence[Tensor],
    x: Quantized,
    weight: Quantized,
    expert_start: Tensor,
    num_tokens_per_expert: Tensor,
    rows_per_expert: float | None,
    out: Tensor | None,
) -> tuple:
    (data, sf), (w, w_sf) = x, weight
    rows = len(data)
    stride = sf.stride(1) if sf.shape[1] > 1 else rows
    # The scales as they lie in memory, without what may follow the last column.
    flat = sf.as_strided(((sf.shape[1] - 1) * stride + rows,), (1,))
    result = outputs[0] if out is None else out
    grid = _multiprocessors(data.device) * blocks
    return data.view(torch.uint8), flat, w, w_sf, expert_start, num_tokens_per_expert, result, stride, grid


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """On a CPU fewer than there are tiles, so that a block makes several."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _finish(
    flat: Tensor,
    x: Quantized,
    weight: Quantized,
    expert_start: Tensor,
    num_tokens_per_expert: Tensor,
    rows_per_expert: float | None,
    out: Tensor | None,
) -> Tensor:
    return flat if out is None else out


def _verify(x: Quantized, weight: Quantized, expert_start: Tensor, num_tokens_per_expert: Tensor, *_: object) -> None:
    end = expert_start.long() + num_tokens_per_expert
    ok = bool(((expert_start >= 0) & (num_tokens_per_expert >= 0) & (end <= len(x[0]))).all())
    _expect.that(ok, "num_tokens_per_expert", f"regions within {len(x[0])} rows", "others")
    largest = int(weight[0][..., tiles.CODES :].max()) if weight[0].numel() else 0
    _expect.that(largest <= tiles.REACH, "weight[0]", f"exponents up to {tiles.REACH}", largest)


def _regions(expert_start: Tensor, num_tokens_per_expert: Tensor, rows: int) -> list[slice]:
    """The rows of each expert, those that exist. Reads them on the host."""
    pairs = zip(expert_start.tolist(), num_tokens_per_expert.tolist(), strict=True)
    return [slice(min(max(start, 0), rows), min(max(start, 0) + max(count, 0), rows)) for start, count in pairs]


def _unspecified(
    results: list, x: Quantized, weight: Quantized, expert_start: Tensor, num_tokens_per_expert: Tensor, *_: object
) -> None:
    kept = torch.zeros(len(x[0]), dtype=torch.bool, device=x[0].device)
    for region in _regions(expert_start, num_tokens_per_expert, len(x[0])):
        kept[region] = True
    results[0][~kept] = 0


def _traffic(x: Quantized, weight: Quantized, expert_start: Tensor, num_tokens_per_expert: Tensor, *_: object) -> int:
    """The weights of the experts that have rows, and these rows."""
    w, w_sf = weight
    experts, rows, m = len(w), len(x[0]), w_sf.shape[1]
    if expert_start.device.type != "meta":
        experts = int((num_tokens_per_expert > 0).sum())
        rows = int(num_tokens_per_expert.sum())
    k = x[0].shape[1]
    return experts * (m * k * 17 // 32 + m * 4 + 8) + rows * (k + k // GROUP * 4 + 2 * m)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    experts: int,
    topk: int,
    m: int,
    k: int,
    alignment: int = 8,
    rows_per_expert: float | None = None,
    drop: bool = False,
    preallocated: bool = False,
) -> tuple:
    idx = make.topk_ids(tokens, experts, topk)
    rows = capacity(tokens * topk, experts, alignment)
    data = make.place(make.randn(rows, k).to(torch.float8_e4m3fn))
    padded = (rows + 3) // 4 * 4
    exponents = make.randint(-8, 3, padded * k // GROUP)
    sf = torch.exp2(exponents.float()).as_strided((rows, k // GROUP), (1, padded))
    layout = (m // tiles.ROWS, k // tiles.COLUMNS, tiles.TILE)
    if idx.device.type == "meta":
        w = torch.empty(experts, *layout, dtype=torch.uint8, device="meta")
        start = count = torch.empty(experts, dtype=torch.int32, device="meta")
    else:
        # Of many experts some have the same weights: random numbers take eight bytes each while they are made.
        some = make.randint(0, 256, min(experts, 8), *layout, dtype=torch.uint8)
        some[..., tiles.CODES :] %= tiles.REACH + 1
        w = make.place(some[torch.arange(experts, device=some.device) % len(some)])
        if drop:
            idx[:, ::3] = -1
        found = get_fused_mapping.operator.call("reference", idx, experts, rows, alignment, True)
        start, count = found[4], found[6]
    w_sf = torch.exp2(make.randint(-20, -10, experts, m).float())
    out = make.value(torch.zeros(rows, m, dtype=torch.bfloat16)) if preallocated else None
    return (data, sf), (w, w_sf), start, count, rows_per_expert, out


def _products() -> tuple[Workload, ...]:
    """Both products of the experts of V4: gate and up, then down."""
    return tuple(
        Workload(
            f"{model.name}-{name}-{phase}",
            {"experts": model.n_routed_experts, "topk": model.num_experts_per_tok, "m": m, "k": k},
            tokens,
            model.key,
        )
        for model in MODELS
        if model.hc_mult and model.quant_group == GROUP
        for name, m, k in (
            ("gate-up", 2 * model.moe_intermediate_size, model.hidden_size),
            ("down", model.hidden_size, model.moe_intermediate_size),
        )
        for phase, tokens in PHASES.items()
    )


def _every_shape() -> tuple[Workload, ...]:
    """Every variant of the kernel: they serve any sizes, and engines choose among them by the number of tokens."""
    sizes = {"experts": 2, "topk": 1, "k": 128}
    return tuple(
        Workload(
            f"{model.name}-{shape.width}", {**sizes, "m": m, "rows_per_expert": min(shape.up_to, 1e6)}, (1,), model.key
        )
        for model in MODELS
        if model.hc_mult and model.quant_group == GROUP
        for m, shapes in ((256, SHAPES), (128, HALF))
        for shape in shapes
    )


@operator(
    spec="matrix product of operators.md P1 and P28 activations with OCP MXFP4 weights",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    finish=_finish,
    verify=_verify,
    unspecified=_unspecified,
    traffic=_traffic,
    mutates=["out"],
    equality=Diff(1e-5),
    cases=[
        {"tokens": 0, "experts": 2, "topk": 1, "m": 128, "k": 128},
        {"tokens": 9, "experts": 3, "topk": 2, "m": 128, "k": 384, "rows_per_expert": 2.0},
        {"tokens": 20, "experts": 4, "topk": 2, "m": 128, "k": 256, "rows_per_expert": 6.0, "drop": True},
        {"tokens": 50, "experts": 2, "topk": 1, "m": 256, "k": 256, "alignment": 16, "preallocated": True},
        {"tokens": 70, "experts": 2, "topk": 2, "m": 256, "k": 128, "rows_per_expert": 40.0, "alignment": 1},
        {"tokens": 120, "experts": 1, "topk": 1, "m": 256, "k": 128},
        {"tokens": 100, "experts": 1, "topk": 1, "m": 128, "k": 384},
    ],
    workloads=_products(),
    variants=_every_shape(),
)
def grouped_gemm_fp8_fp4(
    x: Quantized,
    weight: Quantized,
    expert_start: Tensor,
    num_tokens_per_expert: Tensor,
    rows_per_expert: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``out[rows of e] = x[rows of e] @ weight[e].T`` with FP8 activations and FP4 weights, on FP8 tensor cores.

    FP4 weights are converted to e5m2 in registers, exactly; sums are float32. Which rows belong to an expert is read
    on the device.

    Args:
        x: (data, sf) of the rows of all experts. data: float8_e4m3fn [N, K], K a multiple of 128. sf: float32
            [N, K / 128], column-major.
        weight: (tiles, row_sf) of E experts, up to 512, from :func:`tk_serving.gemm.tiles.from_marlin`. tiles: uint8
            [E, M / 64, K / 128, 4352], M a multiple of 128. row_sf: float32 [E, M].
        expert_start: int32 [E]; the first row of each expert, from ``get_fused_mapping``, of any alignment.
        num_tokens_per_expert: int32 [E]; its rows. Rows that do not exist are skipped.
        rows_per_expert: rows of an expert to expect, for the choice of a variant; the result hardly depends on it. By
            default those for which N leaves room when the rows of experts start at multiples of 8.
        out: preallocated result.

    Returns:
        bfloat16 [N, M]. Rows that belong to no expert have unspecified content.

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or layout.
    """
    data, sf = x
    result = torch.zeros(len(data), weight[1].shape[1], dtype=torch.bfloat16, device=data.device)
    for e, rows in enumerate(_regions(expert_start, num_tokens_per_expert, len(data))):
        if rows.start < rows.stop:
            activations = data[rows].float() * sf[rows].repeat_interleave(GROUP, dim=1)
            result[rows] = (activations @ tiles.values(weight[0][e], weight[1][e]).T).bfloat16()
    return result
