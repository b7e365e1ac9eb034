"""FP8 x FP4 products of DeepSeek-V4-Flash's experts on one Hopper GPU: exactness, errors and times.

    python examples/fp4_gemm/bench.py --library build/fp4_gemm/libfp4.so --out build/fp4_gemm/fp4.json

README.md tells how the library is built.
"""

from __future__ import annotations

import ctypes
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import layouts
import torch
import typer
from torch import Tensor

EXPERTS, TOPK = 256, 6
LAYERS = {"gate-up": (4096, 4096), "down": (4096, 2048)}  # n, k
NO_LOOKUP = 2
METHOD = (
    "us: median of 7 CUDA-event times of single launches; weights are many times the L2 cache. Products only: no "
    "routing, casts or SwiGLU. bound: FP4 codes and scales of the experts reached, over the copy bandwidth of this run "
    "(bytes read and written). error: norm of the difference over norm, against float32 on the same FP8 and FP4 "
    "operands, four experts. exact: products of small integers, bit by bit."
)
WORK = [  # tokens, every expert the same number of rows, variants
    (64, False, (0, 1, 2, 3, 13)),
    (256, False, (0, 12)),
    (1024, False, (10, 12)),
    (4096, False, (5, 6)),
    (8192, False, (4, 5, 6, 7, 11, 14)),
    (8192, True, (4, 8, 9)),
    (16384, False, (4, 6)),
]


class Params(ctypes.Structure):
    """``Params`` of kernel.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "sf", "wref", "out", "tiles")),
        *((name, ctypes.c_int) for name in ("num_tiles", "kb", "sf_stride", "n_out", "one")),
    ]


class Variant:
    """One of the ``CONFIGS`` of kernel.cu."""

    def __init__(self, library: ctypes.CDLL, number: int) -> None:
        values = (ctypes.c_int * 8)()
        if library.describe(number, values) != 0:
            raise ValueError(f"kernel.cu has no variant {number}")
        self.library, self.number = library, number
        self.width, subtiles, self.kind, scaled, stages, _, blocks, _ = values
        self.rows, self.scaled = 128 * subtiles, bool(scaled)
        self.name = (
            f"{number} {('A', 'B', 'B without look-up')[self.kind]}, {self.width} tokens x {self.rows} rows, {stages} "
            f"stages, {blocks} blocks{'' if scaled else ', no activation scales'}"
        )


class Problem:
    """Operands of one product and room for its results; ``counts``: rows of each expert."""

    def __init__(self, w: Tensor, wref: Tensor, k: int, counts: list[int], x: Tensor | None = None) -> None:
        self.w, self.wref, self.k, self.counts = w, wref, k, counts
        self.n = wref.shape[1]
        self.first = [0]
        for count in counts:
            self.first.append(self.first[-1] + (count + 7) // 8 * 8)
        rows = max(self.first[-1], 256)
        self.x = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device="cuda") if x is None else x
        self.sf = torch.ones(k // 128, rows + 256, device="cuda")  # a tile reads past the rows
        if x is None:
            for i in range(0, rows, 8192):
                v = torch.randn(min(8192, rows - i), k // 128, 128, device="cuda")
                s = torch.exp2(torch.ceil(torch.log2(v.abs().amax(-1) / 448)))
                self.x[i : i + len(v)] = (v / s[..., None]).view(-1, k).to(torch.float8_e4m3fn)
                self.sf[:, i : i + len(v)] = s.T
        self.permuted = layouts.permute(self.x.view(torch.uint8))
        self.out = torch.empty(rows, self.n, dtype=torch.bfloat16, device="cuda")

    def tiles(self, variant: Variant) -> Tensor:
        """Expert, first row, rows and block of weights of every tile."""
        found = []
        for expert, count in enumerate(self.counts):
            if not count:
                continue
            parts = -(-count // variant.width)
            rows = (-(-count // parts) + 7) // 8 * 8
            for block in range(self.n // variant.rows):
                found += [(expert, self.first[expert] + i, min(rows, count - i), block) for i in range(0, count, rows)]
        return torch.tensor(found, dtype=torch.int32, device="cuda")

    def call(self, variant: Variant) -> Callable[[], None]:
        library, tiles, room = variant.library, self.tiles(variant), (ctypes.c_uint8 * 256)()
        rows = len(self.permuted)
        rc = library.make_map(room, ctypes.c_void_p(self.permuted.data_ptr()), rows, self.k, variant.width)
        if rc != 0:
            raise RuntimeError(f"tensor map: {rc}")
        pointers = [t.data_ptr() for t in (self.w, self.sf, self.wref, self.out, tiles)]
        params = Params(*pointers, len(tiles), self.k // 128, self.sf.shape[1], self.n, 1)
        blocks = torch.cuda.get_device_properties(0).multi_processor_count
        held = tiles, self  # their memory outlives the calls

        def launch(held: Any = held) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            rc = library.launch(variant.number, room, ctypes.byref(params), blocks, stream)
            if rc != 0:
                raise RuntimeError(f"launch: {rc}")

        return launch

    def rows_of(self, expert: int) -> slice:
        return slice(self.first[expert], self.first[expert] + self.counts[expert])

    def want(self, expert: int, scaled: bool = True) -> Tensor:
        rows = self.rows_of(expert)
        x = self.x[rows].float()
        if scaled:
            x = x * self.sf[:, rows].T.repeat_interleave(128, 1)
        return x @ (layouts.unpack(self.w[expert]) * self.wref[expert][:, None]).T


def is_exact(variant: Variant) -> bool:
    """Whether products of small integers are equal bit by bit."""
    n, k, generator = 512, 512, torch.Generator("cuda").manual_seed(3)
    counts = [3, 0, min(variant.width, 77) + 5, variant.width]
    codes = torch.randint(0, 16, (4, n, k), dtype=torch.uint8, device="cuda", generator=generator)
    exponents = torch.randint(12, 15, (4, n, k // 32), dtype=torch.uint8, device="cuda", generator=generator)
    rows = max(sum((count + 7) // 8 * 8 for count in counts), 256)
    x = torch.randint(-2, 3, (rows, k), device="cuda", generator=generator).to(torch.float8_e4m3fn)
    problem = Problem(layouts.pack(codes, exponents), torch.ones(4, n, device="cuda"), k, counts, x)
    problem.out.fill_(float("nan"))
    problem.call(variant)()
    return all(torch.equal(problem.out[problem.rows_of(e)], problem.want(e).bfloat16()) for e in range(4) if counts[e])


def error(problem: Problem, variant: Variant) -> float:
    used = [e for e, count in enumerate(problem.counts) if count]
    problem.out.zero_()
    problem.call(variant)()
    difference = total = 0.0
    for expert in used[:: max(1, len(used) // 4)][:4]:
        want = problem.want(expert, variant.scaled).double()
        difference += float((problem.out[problem.rows_of(expert)].double() - want).square().sum())
        total += float(want.square().sum())
    return (difference / total) ** 0.5


def time_us(call: Callable[[], Any], rounds: int = 7) -> float:
    call()
    call()
    samples = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        samples.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1000 * start.elapsed_time(end) for start, end in samples)


def routed(tokens: int, even: bool) -> list[int]:
    """Rows of each expert."""
    if even:
        return [tokens * TOPK // EXPERTS] * EXPERTS
    ids = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens)).topk(TOPK, 1).indices
    return torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()


def random_weights() -> dict[str, tuple[Tensor, Tensor]]:
    """Uniform codes, exponents of groups -2 to 1, scales of rows."""
    generator, found = torch.Generator("cuda").manual_seed(0), {}
    for layer, (n, k) in LAYERS.items():
        w = torch.empty(EXPERTS, n // 64, k // 128, layouts.TILE, dtype=torch.uint8, device="cuda")
        w.view(torch.int32).random_(-(2**31), 2**31, generator=generator)
        exponents = w[..., 4096:]
        exponents.random_(11, 15, generator=generator)
        scales = torch.exp2(torch.randint(-8, -4, (EXPERTS, n), device="cuda", generator=generator).float())
        found[layer] = w, scales
    return found


def copy_bytes_per_us() -> float:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / time_us(lambda: target.copy_(source))


def measured(variant: Variant, problems: dict[str, Problem], tokens: int, even: bool, copy: float) -> dict[str, Any]:
    wrong = variant.kind == NO_LOOKUP
    counts = problems["down"].counts
    used = sum(count > 0 for count in counts)
    us = {layer: time_us(problem.call(variant)) for layer, problem in problems.items()}
    weight_bytes = sum(used * n * k * 17 // 32 for n, k in LAYERS.values())
    flop = sum(2 * sum(counts) * n * k for n, k in LAYERS.values())
    return {
        "tokens": tokens,
        "routing": "even" if even else "random",
        "variant": variant.name,
        "us": us | {"sum": sum(us.values())},
        "experts": used,
        "weight_bytes": weight_bytes,
        "bound_us": weight_bytes / copy,
        "of_bound": weight_bytes / copy / sum(us.values()),
        "tflops": flop / sum(us.values()) / 1e6,
        "error": None if wrong else {layer: error(problem, variant) for layer, problem in problems.items()},
        "exact": None if wrong else is_exact(variant),
    }


def main(library: Annotated[Path, typer.Option()], out: Annotated[Path, typer.Option()]) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded = ctypes.CDLL(str(library.resolve()))
    weights, copy = random_weights(), copy_bytes_per_us()
    rows: list[dict[str, Any]] = []
    for tokens, even, numbers in WORK:
        counts = routed(tokens, even)
        problems = {layer: Problem(*weights[layer], k, counts) for layer, (_, k) in LAYERS.items()}
        for number in numbers:
            row = measured(Variant(loaded, number), problems, tokens, even, copy)
            rows.append(row)
            print(
                f"{tokens:5} {row['routing']:6} {row['variant']:62} {row['us']['sum']:7.1f} us, "
                f"{row['of_bound']:6.1%} of the bound, {row['tflops']:6.1f} TFLOP/s, exact: {row['exact']}",
                flush=True,
            )
            record = {"device": torch.cuda.get_device_name(), "method": METHOD, "copy_gbps": copy / 1e3, "rows": rows}
            out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
