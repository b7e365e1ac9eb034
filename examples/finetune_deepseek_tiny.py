"""Fine-tune a tiny DeepSeek-V4 twice, stock and with the operators of tk-serving, and compare the loss curves.

    python examples/finetune_deepseek_tiny.py

Needs ``pip install 'tk-serving[transformers]'``, no download and no GPU; matplotlib, where installed, draws the plot.
The model has what makes V4 special: hyper-connections over four streams, hash-routed and score-routed experts with a
limit on their activations, and compressed attention. It reads bytes, so there is no tokenizer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tk_serving_patches import apply_tilekernels_to_deepseek_v4

TEXT = Path(__file__).with_name("lighthouse.txt")
SEED = 7
console = Console()


@dataclass
class Run:
    """One training run."""

    losses: list[float]
    seconds: list[float]

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def tiny_v4(device: str) -> nn.Module:
    """A random model of about 0.5 million parameters, the same on every call."""
    config = DeepseekV4Config(
        vocab_size=128,
        hidden_size=64,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=32,
        partial_rotary_factor=0.5,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        mlp_layer_types=["hash_moe", "moe", "moe"],
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        sliding_window=32,
        swiglu_limit=10.0,
    )
    torch.manual_seed(SEED)
    model = DeepseekV4ForCausalLM(config)
    for layer in model.model.layers:
        if layer.mlp.is_hash:  # a checkpoint brings this table
            table = torch.rand(config.vocab_size, config.n_routed_experts).argsort(dim=1)
            layer.mlp.gate.tid2eid.copy_(table[:, : config.num_experts_per_tok])
    return model.to(device, torch.bfloat16).train()


def batches(steps: int, batch: int, length: int, device: str) -> list[Tensor]:
    """Pieces of the text, the same on every call."""
    text = torch.tensor(list(TEXT.read_bytes()), dtype=torch.long)
    draw = torch.Generator().manual_seed(SEED)
    starts = torch.randint(0, len(text) - length, (steps, batch), generator=draw)
    return [torch.stack([text[s : s + length] for s in row.tolist()]).to(device) for row in starts]


def train(model: nn.Module, data: list[Tensor], lr: float, on_step: Callable[[float], None]) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    run = Run([], [])
    for tokens in data:
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())  # waits for the device
        run.seconds.append(time.perf_counter() - start)
        on_step(run.losses[-1])
    return run


def plot(stock: Run, patched: Run, with_times: bool, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(stock.losses) + 1)
    for name, run, style in (
        ("transformers", stock, {"color": "#9aa5b1", "linewidth": 4}),
        ("tk-serving", patched, {"color": "#c2410c", "linewidth": 1.4}),
    ):
        label = f"{name} ({run.step_ms:.0f} ms a step)" if with_times else name
        top.plot(steps, run.losses, label=label, **style)
    top.set_ylabel("loss (nats per byte)")
    top.set_title("Tiny DeepSeek-V4 on the keeper's book", loc="left")
    top.legend(frameon=False)
    difference = [100 * (b - a) / a for a, b in zip(stock.losses, patched.losses, strict=True)]
    bottom.axhline(0, color="#9aa5b1", linewidth=1)
    bottom.plot(steps, difference, color="#c2410c", linewidth=1)
    limit = max(1.0, 1.2 * max(map(abs, difference)))
    bottom.set_ylim(-limit, limit)
    bottom.set_ylabel("difference (%)")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main(
    steps: Annotated[int, typer.Option(help="training steps of each run")] = 120,
    batch: Annotated[int, typer.Option(help="pieces of text in a step")] = 8,
    length: Annotated[int, typer.Option(help="bytes in a piece")] = 64,
    lr: Annotated[float, typer.Option(help="learning rate")] = 1e-3,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path, typer.Option(help="where the plot goes")] = Path("finetune_deepseek_tiny.png"),
    tolerance: Annotated[float, typer.Option(help="allowed mean difference of the losses, relative")] = 0.01,
) -> None:
    """Train twice, compare, and fail if the curves differ."""
    if device == "cpu":
        torch.set_num_threads(1)  # tensors this small are not worth sharing
    data = batches(steps, batch, length, device)
    runs: dict[str, Run] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        for name in ("transformers", "tk-serving"):
            model = tiny_v4(device)
            handle = apply_tilekernels_to_deepseek_v4(model) if name == "tk-serving" else None
            task = progress.add_task(f"{name:>12}", total=steps, loss=float("nan"))
            runs[name] = train(model, data, lr, lambda loss, task=task: progress.update(task, advance=1, loss=loss))
    assert handle is not None
    console.print(str(handle.report()), highlight=False)
    handle.revert()

    stock, patched = runs["transformers"], runs["tk-serving"]
    table = Table("", "first loss", "last loss", "median step")
    for name, run in runs.items():
        table.add_row(name, f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", f"{run.step_ms:.1f} ms")
    console.print(table)
    difference = statistics.mean(abs(a - b) / a for a, b in zip(stock.losses, patched.losses, strict=True))
    console.print(f"Mean difference of the losses: {difference:.2%}")
    if device == "cpu":
        console.print("On a CPU the operators run as torch references: the times say nothing about the kernels.")
    try:
        plot(stock, patched, device != "cpu", out)
        console.print(f"Plot: {out}")
    except ModuleNotFoundError:
        console.print("No plot: matplotlib is not installed.")
    if difference > tolerance:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
