"""Products of few FP8 rows and FP8 weights, both with a scale for every 128 channels: linear layers at decode."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tk_serving.compare import Diff
from tk_serving.config import get_pdl
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Out, Plan, Quantized, operator
from tk_serving.workloads import MODELS, Maker, Model, Workload

GROUP = 128  # channels that share a scale, and rows of weights
MAX_ROWS = 16
"""More rows are work for kernels that hold activations in shared memory."""

TILE, WARPS = 16, 8
"""Rows of weights of a matrix instruction; warps of a block."""

MAX_N, MAX_K = 2**18, 2**16

_expect = Expect("skinny_gemm_fp8")


def config(rows: int, n: int, k: int, groups: int) -> dict[str, int]:
    """The variant for so many rows of activations and these weights; measured on an H200 (docs/records/tuning.md).

    All blocks run at once where that is possible, two on a multiprocessor, and a warp has four slices or more.
    """
    slices = k // GROUP
    split = next((s for s in (1, 2, 4) if _blocks(s, n) * groups >= 190 and slices <= 16 * s), WARPS)
    few = _blocks(split, n) * groups <= 132
    ahead, blocks = (5, 1) if few else (3, 2)
    return {"tokens": 1 if rows <= 8 else 2, "split": split, "ahead": ahead, "blocks": blocks}


def _blocks(split: int, n: int) -> int:
    return -(-n // (TILE * WARPS // split))


def _plan(x: Quantized, weight: Quantized, constant_weight: bool) -> Plan:
    (data, sf), (w, w_sf) = x, weight
    _expect.that(data.dim() in (2, 3), "x[0]", "[M, K] or [M, G, K]", list(data.shape))
    sizes = ("M", "K") if data.dim() == 2 else ("M", "G", "K")
    m, *groups, k = _expect.tensor("x[0]", data, torch.float8_e4m3fn, sizes, contiguous=False)
    _expect.multiple("x[0]", k, GROUP, "K")
    _expect.that(m <= MAX_ROWS, "x[0]", f"at most {MAX_ROWS} rows", m)
    *_, n, _ = _expect.tensor("weight[0]", w, torch.float8_e4m3fn, (*groups, "N", k))
    _expect.multiple("weight[0]", n, TILE, "N")
    _expect.between("weight[0]", n, TILE, MAX_N)
    _expect.that(k <= MAX_K, "x[0]", f"K up to {MAX_K}", k)
    for name, scales, shape in (
        ("x[1]", sf, (m, *groups, k // GROUP)),
        ("weight[1]", w_sf, (*groups, -(-n // GROUP), k // GROUP)),
    ):
        _expect.dtype(name, scales, torch.float32)
        _expect.shape(name, scales, shape)
    _expect.same_device(**{"x[0]": data, "x[1]": sf, "weight[0]": w, "weight[1]": w_sf})
    for name, tensor in {"x[0]": data, "weight[0]": w}.items():
        _expect.that(aligned(tensor), name, "rows that begin at aligned addresses, multiples of 16 bytes", "others")
    early = constant_weight and get_pdl()  # then the kernel says itself when it waits
    chosen = {**config(m, n, k, *groups or (1,)), "weights_first": early}
    launch = Launch("gemm.skinny_gemm_fp8", chosen, functools.partial(_arguments, chosen["split"]), pdl=not early)
    return Plan((Out((m, *groups, n), torch.bfloat16),), (launch,) if m else ())


def _arguments(split: int, outputs: Sequence[Tensor], x: Quantized, weight: Quantized, constant_weight: bool) -> tuple:
    (data, sf), (w, w_sf) = x, weight
    m, n, k = len(data), w.shape[-2], data.shape[-1]
    groups = w.shape[0] if w.dim() == 3 else 1
    memory = (_flat(data.view(torch.uint8)), _flat(sf), _flat(w.view(torch.uint8)), _flat(w_sf), outputs[0].view(-1))
    strides = (*_strides(data)[:2], *_strides(sf), *_strides(w_sf, of_weights=True))
    return *memory, _blocks(split, n), groups, m, n, k, *strides


def _strides(tensor: Tensor, of_weights: bool = False) -> tuple[int, int, int]:
    """Of rows, groups and columns; of groups, rows and columns for weights."""
    if tensor.dim() == 3:
        return tensor.stride()  # type: ignore[return-value]
    rows, columns = tensor.stride()
    return (0, rows, columns) if of_weights else (rows, 0, columns)


def _flat(tensor: Tensor) -> Tensor:
    """The memory from the first to the last element."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.as_strided((span,), (1,))


def _inputs(
    make: Maker,
    *,
    tokens: int,
    n: int,
    k: int,
    groups: int = 0,
    by_columns: bool = True,
    constant_weight: bool = True,
) -> tuple:
    lead = (groups,) if groups else ()
    data = make.randn(tokens, *lead, k).to(torch.float8_e4m3fn)
    sf = make.rand(tokens, *lead, k // GROUP) / 64
    if by_columns and tokens > 0:
        order = (*range(1, sf.dim()), 0)
        sf = sf.permute(order).contiguous().permute(sf.dim() - 1, *range(sf.dim() - 1))
    w = make.randn(*lead, n, k).to(torch.float8_e4m3fn)
    w_sf = make.rand(*lead, -(-n // GROUP), k // GROUP) / 64
    return (make.place(data), sf), (make.place(w), w_sf), constant_weight


def _linears(model: Model) -> Iterator[tuple[str, int, int, int]]:
    """Dense FP8 layers: name, rows of weights, channels, groups."""
    hidden, shared = model.hidden_size, model.n_shared_experts * model.moe_intermediate_size
    if model.quant_group != GROUP:
        return
    heads, q_rank, groups = model.num_attention_heads, model.q_lora_rank, model.o_groups
    if model.hc_mult:
        yield "wqa-wkv", q_rank + 512, hidden, 0
        yield "wq-b", heads * 512, q_rank, 0
        yield "wo-a", 1024, heads * 512 // groups, groups
        yield "wo-b", hidden, 1024 * groups, 0
    else:
        yield "qkv-a", q_rank + 576, hidden, 0
        yield "q-b", heads * 192, q_rank, 0
        yield "o", hidden, heads * 128, 0
    yield "gate-up", 2 * shared, hidden, 0
    yield "down", hidden, shared, 0


def _every_variant() -> Iterator[Workload]:
    """Layers of other sizes, or divided among several GPUs, need the same kernels."""
    for model in MODELS:
        if model.quant_group == GROUP:
            for n, k in ((2**16, 1024), (2**16, 3072), (2**14, 4096), (2**13, 8192), (1024, 8192)):
                yield Workload(f"{model.name}-n{n}-k{k}", {"n": n, "k": k}, (8, 16), model.key)


@operator(
    spec="matrix product of operators.md P1 activations and P2 weights, blocks of 128 x 128",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=Diff(1e-5),
    cases=[
        {"tokens": 0, "n": 128, "k": 128},
        {"tokens": 1, "n": 16, "k": 128},
        {"tokens": 3, "n": 144, "k": 384},
        {"tokens": 8, "n": 128, "k": 2304, "by_columns": False, "constant_weight": False},
        {"tokens": 9, "n": 64, "k": 640, "groups": 3},
        {"tokens": 16, "n": 32, "k": 4352},
        {"tokens": 5, "n": 272, "k": 4096, "groups": 1},
    ],
    workloads=[
        Workload(f"{model.name}-{name}", {"n": n, "k": k, "groups": groups}, (1, 8, 16), model.key)
        for model in MODELS
        for name, n, k, groups in _linears(model)
    ],
    variants=tuple(_every_variant()),
    peers=("vllm", "deepgemm"),
)
def skinny_gemm_fp8(x: Quantized, weight: Quantized, constant_weight: bool = False) -> Tensor:
    """``out = x @ weight.T`` for up to 16 rows of FP8 activations, in groups where both have them.

    Sums are float32, those of 128 channels first, whatever the number of rows: a row's result does not depend on the
    others.

    Args:
        x: (data, sf). data: float8_e4m3fn [M, K] or [M, G, K], K a multiple of 128; rows may have strides that are
            multiples of 16. sf: float32 [M, K / 128] or [M, G, K / 128], of any strides.
        weight: (data, sf). data: float8_e4m3fn [N, K] or [G, N, K], N a multiple of 16. sf: float32
            [ceil(N / 128), K / 128] or [G, ceil(N / 128), K / 128], of any strides.
        constant_weight: the launch directly before this one does not write the weights, so that they may be read while
            it is still running.

    Returns:
        bfloat16 [M, N] or [M, G, N].

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape or layout.
    """
    (data, sf), (w, w_sf) = x, weight
    values = data.float() * sf.repeat_interleave(GROUP, dim=-1)
    weights = w.float() * w_sf.repeat_interleave(GROUP, dim=-1).repeat_interleave(GROUP, dim=-2)[..., : w.shape[-2], :]
    if w.dim() == 2:
        return (values @ weights.T).bfloat16()
    return torch.einsum("mgk,gnk->mgn", values, weights).bfloat16()
