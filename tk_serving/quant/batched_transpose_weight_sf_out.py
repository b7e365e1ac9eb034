"""``batched_transpose_weight_sf`` into given tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.layout import address
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.quant import scales
from tk_serving.workloads import MODELS, Maker, Workload

SLOTS = 4  # weights of one launch
THREADS = 256

expect = Expect("batched_transpose_weight_sf")


def allocations(i: int, sf: Tensor, block_size: int, transposed: bool) -> tuple[Out, Out]:
    """Check the scales of weight ``i``; the layouts of its two results."""
    expect.one_of("block_size", block_size, (32, 128))
    expect.dtype(f"sf[{i}]", sf, torch.float32)
    expect.that(sf.dim() in (2, 3), f"sf[{i}]", "shape [(g,) n / b, k / b]", list(sf.shape))
    expect.that(sf.is_contiguous(), f"sf[{i}]", "a contiguous tensor", f"strides {list(sf.stride())}")
    n, k = (size * block_size for size in sf.shape[-2:])
    ok = n > 0 and k > 0 and n % 128 == 0 and k % 128 == 0
    expect.that(ok, f"sf[{i}]", "n and k that are positive multiples of 128", [n, k])
    first = _words(sf.shape[:-2], n, sf.shape[-1])
    second = _words(sf.shape[:-2], k, sf.shape[-2])
    if transposed:
        second = Out((*sf.shape[:-2], second.shape[-1], k), torch.int32)
    return first, second


def _words(groups: Sequence[int], rows: int, blocks: int) -> Out:
    words = -(-blocks // 4)
    return Out((*groups, rows, words), torch.int32, (*(words * rows for _ in groups), 1, rows))


def _plan(
    sf: list[Tensor], block_size: int, transpose_sf1s: list[bool], sf0s: list[Tensor], sf1s: list[Tensor]
) -> Plan:
    expect.that(len(sf) >= 1, "sf", "at least 1 tensor", 0)
    for name, given in (("transpose_sf1s", transpose_sf1s), ("sf0s", sf0s), ("sf1s", sf1s)):
        expect.that(len(given) == len(sf), name, f"{len(sf)} entries, one for each tensor of sf", len(given))
    for i, scale in enumerate(sf):
        outs = {f"outs[{i}][0]": sf0s[i], f"outs[{i}][1]": sf1s[i]}
        for (name, out), slot in zip(outs.items(), allocations(i, scale, block_size, transpose_sf1s[i]), strict=True):
            expect.same(name, out, slot.shape, slot.dtype, slot.strides)
        expect.same_device(**{"sf[0]": sf[0], f"sf[{i}]": scale} | outs)
    here = [i for i, scale in enumerate(sf) if scale.numel()]
    return Plan((), tuple(_launch(here[at : at + SLOTS], block_size, sf0s, sf1s) for at in range(0, len(here), SLOTS)))


def _launch(indices: list[int], block_size: int, sf0s: list[Tensor], sf1s: list[Tensor]) -> Launch:
    def arguments(_: Sequence[Tensor], sf: list[Tensor], block: int, flags: list[bool], *outs: list[Tensor]) -> tuple:
        flat: list[Tensor] = []
        most = 0
        # Slots without a weight get the first one's tensors, which the kernel does not touch.
        for i in indices + indices[:1] * (SLOTS - len(indices)):
            words = [outs[0][i].mT, outs[1][i] if flags[i] else outs[1][i].mT]
            words = [tensor.reshape(-1, 4) for tensor in words]
            flat += (sf[i] if sf[i].dim() == 3 else sf[i][None], *words)
            most = max(most, words[0].shape[0] + words[1].shape[0])
        return *flat, len(indices), -(-most // THREADS)

    wide = all(address(out) % 16 == 0 for out in (*sf0s, *sf1s))
    return Launch("quant.transpose_weight_sf", {"block_size": block_size, "wide": wide}, arguments)


def _inputs(
    make: Maker, *, tokens: int, weights: list[tuple[int, ...]], block_size: int, transposed: bool = False
) -> tuple:
    """``tokens`` is not used: weights have none."""
    sf, flags, sf0s, sf1s = [], [], [], []
    for i, (*groups, n, k) in enumerate(weights):
        sf.append(torch.exp2(make.randint(-126, 128, *groups, n // block_size, k // block_size, dtype=torch.float32)))
        flags.append(transposed ^ bool(i % 2))
        outs = allocations(i, sf[-1], block_size, flags[-1])
        sf0s.append(outs[0].zeros(make.device))
        sf1s.append(outs[1].zeros(make.device))
    return sf, block_size, flags, sf0s, sf1s


def _verify(sf: list[Tensor], *_: object) -> None:
    for i, scale in enumerate(sf):
        expect.that(scales.powers_of_two(scale), f"sf[{i}]", "positive powers of two", "other values")


def _experts() -> list[Workload]:
    """Gate and up, and down projections of 32 experts, which one of eight ranks holds of 256."""
    found = []
    for model in MODELS:
        b, h, m = 32 if model.quant_group == 32 else 128, model.hidden_size, model.moe_intermediate_size
        shapes = [(32, 2 * m, h), (32, h, m)]
        found.append(Workload(f"{model.name}-experts", {"weights": shapes, "block_size": b}, (1,), model.key))
    return found


@operator(
    spec="operators.md A8",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("sf0s", "sf1s"),
    verify=_verify,
    cases=[
        {"tokens": 1, "weights": [(256, 640), (2, 128, 384)], "block_size": 128},
        {"tokens": 1, "weights": [(128, 128)] * 4 + [(0, 128, 128), (3, 256, 128)], "block_size": 32},
    ],
    workloads=_experts(),
)
def batched_transpose_weight_sf_out(
    sf: list[Tensor], block_size: int, transpose_sf1s: list[bool], sf0s: list[Tensor], sf1s: list[Tensor]
) -> None:
    """``batched_transpose_weight_sf`` into the caller's tensors; four weights in a launch.

    Args:
        sf: float32 [(g,) n / b, k / b] for each weight.
        block_size: b, 32 or 128.
        transpose_sf1s: whether the second result has the storage's row order.
        sf0s, sf1s: the results, in the layouts that ``batched_transpose_weight_sf`` returns; written.

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, layout, block size or length of a list.
    """
    for scale, transposed, sf0, sf1 in zip(sf, transpose_sf1s, sf0s, sf1s, strict=True):
        exponents = scales.exponents(scale, scale.shape[-1])
        sf0.copy_(scales.pack(exponents).repeat_interleave(block_size, dim=-2))
        words = scales.pack(exponents.mT.contiguous()).repeat_interleave(block_size, dim=-2)
        sf1.copy_(words.mT if transposed else words)
