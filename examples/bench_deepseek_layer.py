"""Time the parts of a DeepSeek-V4 layer in transformers, stock and patched, forward and with backward.

    python examples/bench_deepseek_layer.py --out docs/records/transformers-h200.json

Random weights in the shapes of V4-Flash, bfloat16, one layer, no download. Both sides run the same modules, eager, in
one process, turn by turn; before a part is timed its outputs and gradients are compared.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4Model

import tk_serving
from tk_serving.environment import revision
from tk_serving_patches import apply

TARGET = ("mhc", "routing", "swiglu")  # the parts that the project promises to speed up
console = Console()


class NoAttention(nn.Module):
    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return x, None


class NoExperts(nn.Module):
    def forward(self, x: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return x


def flash_model(tiny: bool, device: str) -> nn.Module:
    """One layer of V4-Flash with sliding attention, and its head."""
    small = {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
    }
    config = DeepseekV4Config(
        vocab_size=1024,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        mlp_layer_types=["moe"],
        **(small if tiny else {}),
    )
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = DeepseekV4Model(config)
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        model.layers[0].mlp.gate.weight.normal_(std=0.1)
    return model


def parts_of(model: nn.Module, tokens: int) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Modules and their inputs."""
    layer, config = model.layers[0], model.config
    device = model.embed_tokens.weight.device

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, streams = rows(1, tokens, config.hidden_size), rows(1, tokens, config.hc_mult, config.hidden_size)
    only_streams = copy.copy(layer)
    only_streams._modules = {
        **layer._modules,
        "self_attn": NoAttention(),
        "mlp": NoExperts(),
        "input_layernorm": nn.Identity(),
        "post_attention_layernorm": nn.Identity(),
    }
    ids = torch.rand(tokens, config.n_routed_experts, device=device).argsort(1)[:, : config.num_experts_per_tok]
    weights = torch.rand(tokens, config.num_experts_per_tok, device=device)
    return {
        "mhc": (only_streams, (streams,)),
        "mhc-head": (model.hc_head, (streams,)),
        "routing": (layer.mlp.gate, (x,)),
        "swiglu": (layer.mlp.shared_experts, (x,)),
        "experts": (layer.mlp.experts, (x[0], ids, weights)),
        "rms-norm": (layer.input_layernorm, (x,)),
        "model of one layer": (model, (torch.randint(0, config.vocab_size, (1, tokens), device=device),)),
    }


def floats(result: Any) -> list[Tensor]:
    """The floating-point tensors of a result."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if hasattr(result, "last_hidden_state"):
        return [result.last_hidden_state]
    return [t for item in result for t in floats(item)]


def forward(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        module(*inputs)


def training(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of inputs and parameters."""
    inputs = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in inputs)
    outputs = [t for t in floats(module(*inputs)) if t.requires_grad]
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    draw = torch.Generator(outputs[0].device).manual_seed(0)
    of_outputs = [torch.empty_like(t).normal_(generator=draw) for t in outputs]
    grads = torch.autograd.grad(outputs, wanted, of_outputs, allow_unused=True)
    return [t.detach() for t in outputs], [g for g in grads if g is not None]


def off(a: list[Tensor], b: list[Tensor]) -> float:
    """Distance relative to the size of b, over all tensors."""
    far = sum(float((x.float() - y.float()).square().sum()) for x, y in zip(a, b, strict=True))
    return (far / sum(float(y.float().square().sum()) for y in b)) ** 0.5


def measure(sides: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds of a call, the sides turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 3):
        for name in sides if number % 2 == 0 else reversed(list(sides)):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            sides[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def peak(call: Callable[[], None]) -> int:
    """Device memory that a call takes at most, in bytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(stock: tuple, patched: tuple, rounds: int, device: str) -> dict[str, Any]:
    """One part, as (module, inputs) of either side: agreement, times and memory."""
    ours, theirs = training(*patched), training(*stock)
    row: dict[str, Any] = {"outputs differ by": off(ours[0], theirs[0]), "gradients differ by": off(ours[1], theirs[1])}
    del ours, theirs
    for call in (forward, training):
        sides = {"stock": functools.partial(call, *stock), "patched": functools.partial(call, *patched)}
        times = measure(sides, rounds, device)
        result = {f"{name} ms": value for name, value in times.items()}
        result["ratio"] = times["stock"] / times["patched"]
        if device == "cuda":
            result |= {f"{name} MiB": peak(side) / 2**20 for name, side in sides.items()}
        row[call.__name__] = result
    return row


def main(
    out: Annotated[Path | None, typer.Option(help="file for the record, JSON")] = None,
    tokens: Annotated[int, typer.Option(help="tokens of the one sequence")] = 4096,
    rounds: Annotated[int, typer.Option(help="timed calls of either side")] = 20,
    tiny: Annotated[bool, typer.Option(help="small shapes, to try the script")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Compare and time every part, then the three parts together that the project promises to speed up."""
    stock = flash_model(tiny, device)
    patched = copy.deepcopy(stock)
    sides = [parts_of(model, tokens) for model in (stock, patched)]
    report = apply(patched, strict=True).report
    apply(sides[1]["mhc"][0])  # a layer of its own
    rows = {}
    for name in track(sides[0], "Parts", console=console):
        module, inputs = sides[0][name]
        rows[name] = compare((module, inputs), (sides[1][name][0], inputs), rounds, device)
    together = {
        kind: sum(rows[part][kind]["stock ms"] for part in TARGET)
        / sum(rows[part][kind]["patched ms"] for part in TARGET)
        for kind in ("forward", "training")
    }

    table = Table("part", "outputs", "gradients", "forward ms", "", "ratio", "training ms", "", "ratio", "MiB", "")
    for name, row in rows.items():
        cells = [name, f"{row['outputs differ by']:.1e}", f"{row['gradients differ by']:.1e}"]
        for kind in ("forward", "training"):
            cells += [f"{row[kind][key]:.2f}" for key in ("stock ms", "patched ms", "ratio")]
        cells += [f"{row['training'].get(f'{side} MiB', 0):.0f}" for side in ("stock", "patched")]
        table.add_row(*cells)
    console.print(table)
    console.print(f"{' + '.join(TARGET)}: forward {together['forward']:.2f}x, training {together['training']:.2f}x")
    left = {row.site: row.left for row in report() if row.left}
    if left:
        console.print("Left to transformers:", left)
    if out is not None:
        record = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "revision": revision(),
            "versions": {m.__name__: m.__version__ for m in (torch, transformers, tk_serving)},
            "shape": "tiny" if tiny else "DeepSeek-V4-Flash, one layer, sliding attention, bfloat16",
            "tokens": tokens,
            "method": f"median wall time of {rounds} eager calls of either side, turn by turn, device synchronised",
            "parts": rows,
            "ratio of " + " + ".join(TARGET): together,
            "left to transformers": left,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
