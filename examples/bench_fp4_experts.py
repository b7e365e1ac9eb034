"""Routed FP4 experts on one Hopper GPU: vLLM's Marlin (W4A16) against FP8 activations with the FP4 weights as they are
(w4a8), upcast on the fly, or resident in FP8.

    python examples/bench_fp4_experts.py --out docs/records/fp4-experts-layer-h200.json

Random FP4 codes in the layer shapes of DeepSeek-V4-Flash, scales as those of normal weights. Needs vLLM 0.33 with its
DeepGEMM. Each path is timed whole, from routed token rows to summed rows, as a CUDA graph; the stages of ours one by
one. Errors are those of the first tokens against float32 arithmetic on the same FP4 weights.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tk_serving import environment
from tk_serving.bench import record
from tk_serving.gemm.grouped_gemm_fp8_fp4 import grouped_gemm_fp8_fp4
from tk_serving.modeling.fp8_experts import (
    Fp4Weights,
    Fp8Weights,
    Layer,
    Layers,
    Policy,
    alignment,
    routed_experts,
    w4a8,
)
from tk_serving.moe.expand_to_fused_and_cast import expand_to_fused_and_cast
from tk_serving.moe.get_fused_mapping import capacity, get_fused_mapping
from tk_serving.moe.reduce_fused import reduce_fused
from tk_serving.quant import marlin
from tk_serving.quant.formats import decode_e2m1
from tk_serving.quant.scales import of_exponents
from tk_serving.quant.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast

TOKENS = (1, 8, 16, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
HIDDEN, INTERMEDIATE, EXPERTS, TOPK, LIMIT = 4096, 2048, 256, 6, 10.0
METHOD = (
    "ms: median of CUDA-event times of single replays of a CUDA graph of the call, all paths in turn, inputs in memory "
    "(the weights are many times the L2 cache). stages: each alone. errors: norm of the difference over norm of the "
    "reference, float32 on the same FP4 weights without quantised activations. runs: the path that each mode takes at "
    "this number of tokens, and its time over Marlin's. experts: that have tokens."
)
console = Console(width=170)


def fp4_weights(device: str, seed: int, experts: int = EXPERTS) -> Fp4Weights:
    """Uniform codes; exponents of 1 x 32 scales of normal weights: mostly one value, some rows larger or smaller."""
    generator = torch.Generator(device).manual_seed(seed)

    def codes(n: int, k: int) -> Tensor:
        words = torch.empty(experts, k // 16, 2 * n, dtype=torch.int32, device=device)
        return words.random_(-(2**31), 2**31, generator=generator)

    def exponents(n: int, k: int) -> Tensor:
        # Of eight groups one is larger and one smaller by 2, of sixteen rows one each by 8.
        groups = torch.empty(experts, k // 32, n, dtype=torch.int8, device=device).random_(0, 8, generator=generator)
        rows = torch.empty(experts, 1, n, dtype=torch.int8, device=device).random_(0, 16, generator=generator)
        spread = (groups == 0).byte() + (groups != 1).byte() + 3 * ((rows == 0).byte() + (rows != 1).byte())
        return spread + (127 - 12)

    return Fp4Weights(
        codes(2 * INTERMEDIATE, HIDDEN),
        exponents(2 * INTERMEDIATE, HIDDEN),
        codes(HIDDEN, INTERMEDIATE),
        exponents(HIDDEN, INTERMEDIATE),
    )


def marlin_path(weights: Fp4Weights) -> Callable[..., Tensor]:
    """vLLM's routed experts as its MarlinExperts calls them."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    def moe_sum(rows: Tensor, out: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
        ops.moe_sum(rows, out)
        return out

    def call(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        return fused_marlin_moe(
            x,
            weights.w13,
            weights.w2,
            None,
            None,
            weights.w13_sf.view(torch.float8_e8m0fnu),
            weights.w2_sf.view(torch.float8_e8m0fnu),
            topk_weights,
            ids.int(),
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=len(weights.w13),
            activation=MoEActivation.SILU,
            activation_config=ApplyMoEActivationConfig(clamp_limit=LIMIT),
            moe_sum=moe_sum,
        )

    return call


def ours(room: Resident, rows: int) -> Callable[..., Tensor]:
    from vllm.utils.deep_gemm import mk_alignment_scope

    from tk_serving_vllm.sites.fp4_experts import product

    def call(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        fp8 = room.acquire()
        with mk_alignment_scope(rows):
            return routed_experts(
                x,
                fp8,
                ids,
                topk_weights,
                product,
                alignment=rows,
                swiglu_limit=LIMIT,
                sf_clamp_min=1e-10,
            )

    return call


def as_it_is(tiles: w4a8.Fp4Tiles) -> Callable[..., Tensor]:
    def call(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        return w4a8.routed_experts(x, tiles, ids.int(), topk_weights, swiglu_limit=LIMIT, sf_clamp_min=1e-10)

    return call


class Resident:
    """A layer whose FP8 weights are there already."""

    def __init__(self, weights: Fp8Weights) -> None:
        self.weights = weights

    def acquire(self) -> Fp8Weights:
        return self.weights


class Upcast(Resident):
    """A layer whose weights are upcast in each call, into room that others have used meanwhile."""

    def __init__(self, layer: Layer, weights: Fp8Weights) -> None:
        super().__init__(weights)
        self.layer = layer

    def acquire(self) -> Fp8Weights:
        self.layer.upcast(self.weights.w13, self.weights.w2)
        return self.weights


def inputs(tokens: int, device: str, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, device=device, generator=generator).bfloat16()
    scores = torch.rand(tokens, EXPERTS, device=device, generator=generator)
    weights, ids = scores.topk(TOPK, dim=1)
    return x, ids.contiguous(), (1.5 * weights / weights.sum(1, keepdim=True)).contiguous()


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """Replays of the call as a CUDA graph, so that the host's work does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def time_calls(named: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float | str]:
    """Median milliseconds of each; the text of the error where one fails."""
    found: dict[str, float | str] = {}
    samples: dict[str, list[float]] = {}
    replays = {}
    for name, call in named.items():
        try:
            replays[name] = graphed(call)
            samples[name] = []
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    for _ in range(rounds):
        events = {}
        for name in samples:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replays[name]()
            end.record()
            events[name] = start, end
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            samples[name].append(start.elapsed_time(end))
    return found | {name: statistics.median(s) for name, s in samples.items()}


def stages(
    layer: Layer, fp8: Fp8Weights, x: Tensor, ids: Tensor, topk_weights: Tensor, padding: int
) -> dict[str, Callable[[], Any]]:
    """Each stage of ours as a call of its own, in order."""
    from vllm.utils.deep_gemm import mk_alignment_scope

    from tk_serving_vllm.sites.fp4_experts import product

    rows = capacity(ids.numel(), EXPERTS, padding)
    mapping = get_fused_mapping(ids, EXPERTS, rows, padding, True)
    experts, positions = mapping[0], mapping[3]
    a = expand_to_fused_and_cast(x, "e4m3", 128, positions, experts, True, True)
    inner = torch.zeros(rows, 2 * INTERMEDIATE, dtype=x.dtype, device=x.device)
    flags = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "swiglu_clamp_value": LIMIT, "sf_clamp_min": 1e-10}

    def multiply(a: Any, b: Any, out: Tensor) -> None:
        with mk_alignment_scope(padding):
            product(a, b, out, experts)

    multiply(a, (fp8.w13, fp8.w13_sf), inner)
    act = functools.partial(swiglu_forward_and_per_token_cast, inner, "e4m3", 128, pos_to_expert=experts, **flags)
    b = act()
    outer = torch.zeros(rows, HIDDEN, dtype=x.dtype, device=x.device)
    return {
        "upcast": lambda: layer.upcast(fp8.w13, fp8.w2),
        "mapping": lambda: get_fused_mapping(ids, EXPERTS, rows, padding, True),
        "expand+cast": lambda: expand_to_fused_and_cast(x, "e4m3", 128, positions, experts, True, True),
        "product 1": lambda: multiply(a, (fp8.w13, fp8.w13_sf), inner),
        "swiglu+cast": act,
        "product 2": lambda: multiply(b, (fp8.w2, fp8.w2_sf), outer),
        "reduce": lambda: reduce_fused(outer, topk_weights, positions),
    }


def stages_as_it_is(tiles: w4a8.Fp4Tiles, x: Tensor, ids: Tensor, topk_weights: Tensor) -> dict[str, Callable[[], Any]]:
    """Each stage with FP4 weights as they are, as a call of its own, in order."""
    shape, share = tiles.shape, ids.numel() / EXPERTS
    rows = shape.rows(ids.numel(), w4a8.ALIGNMENT)
    ids = ids.int()
    mapping = functools.partial(get_fused_mapping, ids, EXPERTS, rows, w4a8.ALIGNMENT, True)
    experts, _, _, positions, start, _, counts, _ = mapping()
    flags = {"round_sf": True, "zero_padding": False}
    expand = functools.partial(expand_to_fused_and_cast, x, "e4m3", 128, positions, experts, True, **flags)
    a = expand()
    inner = torch.zeros(rows, shape.width, dtype=x.dtype, device=x.device)
    outer = torch.zeros(rows, shape.hidden, dtype=x.dtype, device=x.device)
    first = functools.partial(
        grouped_gemm_fp8_fp4, a, (tiles.w13, tiles.w13_sf), start, counts, rows_per_expert=share, out=inner
    )
    first()
    flags |= {"use_tma_aligned_col_major_sf": True, "swiglu_clamp_value": LIMIT, "sf_clamp_min": 1e-10}
    act = functools.partial(swiglu_forward_and_per_token_cast, inner, "e4m3", 128, pos_to_expert=experts, **flags)
    b = act()
    second = functools.partial(
        grouped_gemm_fp8_fp4, b, (tiles.w2, tiles.w2_sf), start, counts, rows_per_expert=share, out=outer
    )
    reduce = functools.partial(reduce_fused, outer, topk_weights, positions)
    names = ("mapping", "expand+cast", "product 1", "swiglu+cast", "product 2", "reduce")
    return dict(zip(names, (mapping, expand, first, act, second, reduce), strict=True))


def dequantised(codes: Tensor, sf: Tensor, expert: int) -> Tensor:
    """float32 [N, K] of one expert."""
    scale = of_exponents(marlin.unpack_exponents(sf[expert]).int())
    return decode_e2m1(marlin.unpack_codes(codes[expert])) * scale.repeat_interleave(32, dim=1)


def reference(weights: Fp4Weights, x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
    """float32 all the way."""
    out = torch.zeros(len(x), HIDDEN, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ dequantised(weights.w13, weights.w13_sf, expert).T).chunk(2, dim=1)
        y = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        y = y @ dequantised(weights.w2, weights.w2_sf, expert).T
        out.index_add_(0, token, y * topk_weights[token, choice, None])
    return out


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def errors(
    weights: Fp4Weights, tiles: w4a8.Fp4Tiles, fp8: Fp8Weights | None, device: str, tokens: int = 24
) -> dict[str, float]:
    x, ids, topk_weights = inputs(tokens, device, seed=7)
    exact = reference(weights, x, ids, topk_weights)
    theirs = marlin_path(weights)(x, ids, topk_weights)
    direct = as_it_is(tiles)(x, ids, topk_weights)
    found = {
        "w4a16 against float32": distance(theirs, exact),
        "w4a8 against float32": distance(direct, exact),
        "w4a8 against w4a16": distance(direct, theirs),
    }
    if fp8 is not None:
        mine = ours(Resident(fp8), 128)(x, ids, topk_weights)
        found["fp8 against float32"] = distance(mine, exact)
        found["fp8 against w4a8"] = distance(mine, direct)
        same = [torch.equal(dequantised(weights.w13, weights.w13_sf, 3), _blocks(fp8.w13[3], fp8.w13_sf[3]))]
        same.append(torch.equal(dequantised(weights.w2, weights.w2_sf, 5), _blocks(fp8.w2[5], fp8.w2_sf[5])))
        found["upcast exact"] = float(all(same))
    return found


def _blocks(values: Tensor, sf: Tensor) -> Tensor:
    return values.float() * sf.repeat_interleave(128, 0).repeat_interleave(128, 1)


def conclude(tokens: int, whole: dict[str, float | str]) -> dict[str, Any]:
    """What each mode runs at this number of tokens, and its time over Marlin's."""
    found = {}
    for mode in ("w4a8", "upcast", "resident"):
        path = mode if mode == "w4a8" or Policy(mode).takes(tokens, TOPK, EXPERTS) else "marlin"
        times = whole.get(path), whole["marlin"]
        ratio = times[0] / times[1] if isinstance(times[0], float) and isinstance(times[1], float) else None
        found[mode] = {"path": path, "over marlin": ratio}
    return found


def main(
    out: Annotated[Path | None, typer.Option(help="record to write")] = None,
    tokens: Annotated[str, typer.Option(help="comma-separated")] = ",".join(map(str, TOKENS)),
    rounds: int = 9,
    fp8: Annotated[bool, typer.Option(help="also with FP8 weights, upcast and resident")] = True,
    revision: Annotated[str, typer.Option(help="git revision, where the checkout does not know it")] = "",
) -> None:
    device = "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    weights = fp4_weights(device, 0)
    group = Layers("upcast")
    layer = group.add(weights) if fp8 else None
    if isinstance(layer, str):
        raise typer.BadParameter(layer)
    fp8_weights = layer.acquire() if layer else None
    laying_out = time.perf_counter()
    tiles = w4a8.Fp4Tiles(*w4a8.laid_out(weights.w13, weights.w13_sf), *w4a8.laid_out(weights.w2, weights.w2_sf))
    torch.cuda.synchronize()
    laying_out = time.perf_counter() - laying_out
    result: dict[str, Any] = {
        "what": "routed experts of one layer, DeepSeek-V4-Flash shapes: vLLM's Marlin (W4A16) and FP8 activations, "
        "with FP4 weights as they are and with FP8 weights around DeepGEMM",
        "device": torch.cuda.get_device_name(),
        "driver": record.driver(),
        "versions": record.versions(),
        "revision": revision or environment.revision(),
        "date": record.today(),
        "method": METHOD,
        "shape": {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": EXPERTS, "topk": TOPK, "limit": LIMIT},
        "fp4_bytes": weights.num_bytes,
        "workspace_bytes": group.extra_bytes,
        "tiles_bytes": tiles.num_bytes,
        "laying_out_s": laying_out,
        "threshold_tokens": {mode: Policy(mode).threshold(TOPK, EXPERTS) for mode in ("upcast", "resident")},
        "errors": errors(weights, tiles, fp8_weights, device),
        "rows": [],
    }
    console.print(result["errors"])
    stock = marlin_path(weights)
    for count in map(int, tokens.split(",")):
        x, ids, topk_weights = inputs(count, device)
        chosen = alignment(count, TOPK, EXPERTS)
        paths: dict[str, Callable[[], Any]] = {"marlin": functools.partial(stock, x, ids, topk_weights)}
        if layer and fp8_weights:
            for name, room in (("upcast", Upcast(layer, fp8_weights)), ("resident", Resident(fp8_weights))):
                paths[name] = functools.partial(ours(room, chosen), x, ids, topk_weights)
        paths["w4a8"] = functools.partial(as_it_is(tiles), x, ids, topk_weights)
        whole = time_calls(paths, rounds)
        parts: dict[str, float | str] = {}
        if layer and fp8_weights:
            parts = time_calls(stages(layer, fp8_weights, x, ids, topk_weights, chosen), rounds)
        direct = time_calls(stages_as_it_is(tiles, x, ids, topk_weights), rounds)
        row = {
            "tokens": count,
            "experts": len(ids.unique()),
            "alignment": chosen,
            "ms": whole,
            "stages": parts,
            "stages_w4a8": direct,
            "runs": conclude(count, whole),
        }
        result["rows"].append(row)
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
        table = Table("T", *whole, *(f"w4a8: {name}" for name in direct))
        times = (f"{t:.4f}" if isinstance(t, float) else t for t in (*whole.values(), *direct.values()))
        table.add_row(str(count), *times)
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
