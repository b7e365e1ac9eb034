"""Train a tiny model twice, with the operators of tk-serving and in plain torch, and compare the losses step by step.

    python examples/train_mhc_engram_moe.py --steps 200 --out train.json

Two layers with hyper-connections over four residual streams: a mixer over the last tokens, and experts whose inputs are
rounded to FP8 in groups of 128; before them an Engram gate on hashed bigrams and trigrams. One side takes all of it
from ``tk_serving.modeling``, kernels forward and backward; the other writes out the formulas and leaves the gradients
to autograd. Weights, data and optimizer are the same. The model reads bytes of a text next to this file.

Exits with 1 if the losses differ by more than the tolerance in any step.
"""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional

from tk_serving.bench.record import driver, today, versions
from tk_serving.engram import engram_hash
from tk_serving.environment import revision
from tk_serving.modeling import mhc, moe, quant
from tk_serving.modeling.engram import engram_gate

TEXT = Path(__file__).with_name("lighthouse.txt")
SEED = 7
STREAMS, EPS, CLAMP, LIMIT, GROUP = 4, 1e-6, 1e-6, 10.0, 128
console = Console()


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batches."""

    vocab: int = 128
    hidden: int = 256
    layers: int = 2
    experts: int = 8
    topk: int = 2
    intermediate: int = 128
    window: int = 8
    table: int = 509  # rows for each kind of n-gram
    batch: int = 8
    length: int = 32


class Ours:
    """The layers of ``tk_serving.modeling``."""

    expand = staticmethod(mhc.expand_from_embedding)
    post = staticmethod(mhc.ops.mhc_post)
    round_fp8 = staticmethod(quant.round_through)

    @staticmethod
    def pre(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return mhc.mhc_pre(streams, fn, scale, base, post_mult_value=2.0, sinkhorn_repeat=20)

    @staticmethod
    def head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Tensor:
        return mhc.mhc_head(streams, fn, scale, base)

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return quant.rms_norm(x, weight, EPS)

    @staticmethod
    def engram(streams: Tensor, k: Tensor, v: Tensor, weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
        return engram_gate(streams, k, v, weight_hidden, weight_embed, CLAMP, EPS)

    @staticmethod
    def swiglu(x: Tensor) -> Tensor:
        return quant.swiglu(x, clamp_value=LIMIT)

    @classmethod
    def experts(cls, x: Tensor, logits: Tensor, up: Tensor, down: Tensor, topk: int) -> Tensor:
        ids, weights = moe.gate(logits, topk, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
        mapping = moe.map_to_experts(ids, len(up))
        rows = moe.expand(cls.round_fp8(x, "e4m3", GROUP), mapping)
        results, start = [], 0
        for expert, end in enumerate(mapping.expert_end.tolist()):
            inner = cls.swiglu(rows[start:end] @ up[expert].to(rows.dtype).T)
            results.append(cls.round_fp8(inner, "e4m3", GROUP) @ down[expert].to(rows.dtype).T)
            start = end
        return moe.reduce(torch.cat(results), weights, mapping)


class Plain:
    """The same layers written out in torch, in float32 between the roundings to bfloat16."""

    @staticmethod
    def expand(x: Tensor) -> Tensor:
        return x.unsqueeze(-2).expand(*x.shape[:-1], STREAMS, x.shape[-1]).contiguous()

    @staticmethod
    def mixes(streams: Tensor, fn: Tensor) -> Tensor:
        flat = streams.flatten(-2).float()
        return flat @ _TF32.apply(fn).T * (flat.square().mean(-1, keepdim=True) + EPS).rsqrt()

    @classmethod
    def pre(cls, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        z = cls.mixes(streams, fn) * scale.repeat_interleave(torch.tensor([4, 4, 16], device=fn.device)) + base
        pre, post = z[..., :4].sigmoid() + EPS, 2.0 * z[..., 4:8].sigmoid()
        comb = z[..., 8:].unflatten(-1, (STREAMS, STREAMS)).softmax(-1) + EPS
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
        for _ in range(19):
            comb = comb / (comb.sum(-1, keepdim=True) + EPS)
            comb = comb / (comb.sum(-2, keepdim=True) + EPS)
        return cls.weighted(streams, pre), (post.unsqueeze(-1), comb)

    @staticmethod
    def weighted(streams: Tensor, pre: Tensor) -> Tensor:
        return (streams.float() * pre.unsqueeze(-1)).sum(-2).to(streams.dtype)

    @staticmethod
    def post(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        kept = torch.einsum("...io,...ih->...oh", comb, streams.float())
        return (kept + post * x.float().unsqueeze(-2)).to(streams.dtype)

    @classmethod
    def head(cls, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Tensor:
        return cls.weighted(streams, (cls.mixes(streams, fn) * scale + base).sigmoid() + EPS)

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.float()).to(x.dtype)

    @staticmethod
    def engram(streams: Tensor, k: Tensor, v: Tensor, weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
        x, key = streams.float(), k.float()
        weight = weight_hidden.float() * weight_embed.float()
        rms = ((x.square().mean(-1) + EPS) * (key.square().mean(-1) + EPS)).rsqrt()
        z = (x * weight * key).sum(-1) * rms / math.sqrt(x.shape[-1])
        gate = (z.sign() * z.abs().clamp(min=CLAMP).sqrt()).sigmoid()
        return (x + gate.unsqueeze(-1) * v.float().unsqueeze(-2)).to(streams.dtype)

    @staticmethod
    def swiglu(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        return (functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)).to(x.dtype)

    @staticmethod
    def round_fp8(x: Tensor) -> Tensor:
        groups = x.detach().float().unflatten(-1, (-1, GROUP))
        amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
        inverse = torch.full_like(amax, 448.0) / amax  # 448.0 / amax would multiply by a reciprocal, and move ties
        codes = (groups * inverse).to(torch.float8_e4m3fn)
        rounded = (codes.float() * (amax / 448.0)).flatten(-2).to(x.dtype)
        return x + (rounded - x).detach()

    @classmethod
    def experts(cls, x: Tensor, logits: Tensor, up: Tensor, down: Tensor, topk: int) -> Tensor:
        scores = functional.softplus(logits).sqrt()
        ids = scores.detach().topk(topk).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * 1.5
        rows, out = cls.round_fp8(x), torch.zeros(x.shape, device=x.device)
        for expert in range(len(up)):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            inner = cls.round_fp8(cls.swiglu(rows[token] @ up[expert].to(x.dtype).T))
            result = inner @ down[expert].to(x.dtype).T
            out = out.index_add(0, token, result.float() * weights[token, slot, None])
        return out.to(x.dtype)


class _TF32(torch.autograd.Function):
    """Round to TF32; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Model(nn.Module):
    """Parameters of the model; ``side`` computes."""

    def __init__(self, side: type[Ours] | type[Plain], sizes: Sizes) -> None:
        super().__init__()
        self.side, self.sizes = side, sizes
        h, i, e = sizes.hidden, sizes.intermediate, sizes.experts

        def normal(*shape: int, fan: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * fan**-0.5)

        self.embedding = nn.Parameter(torch.randn(sizes.vocab, h))
        self.tables = normal(2 * sizes.table, h, fan=4)
        self.keys, self.values = normal(STREAMS * h, h, fan=h), normal(h, h, fan=h)
        self.weight_hidden, self.weight_embed = (nn.Parameter(torch.ones(STREAMS, h).bfloat16()) for _ in range(2))
        self.layers = nn.ModuleList()
        for _ in range(sizes.layers):
            layer = nn.Module()
            layer.connections = nn.ModuleList(mhc.HyperConnection(h) for _ in range(2))  # holds the parameters
            for connection in layer.connections:
                nn.init.normal_(connection.fn, std=0.5 * (STREAMS * h) ** -0.5)
            layer.norms = nn.ParameterList(torch.ones(h).bfloat16() for _ in range(2))
            layer.taps, layer.mix = normal(sizes.window, h, fan=sizes.window), normal(h, h, fan=h)
            layer.router = normal(e, h, fan=h)
            layer.up, layer.down = normal(e, 2 * i, h, fan=h), normal(e, h, i, fan=i)
            self.layers.append(layer)
        self.head, self.norm = mhc.HyperHead(h), nn.Parameter(torch.ones(h).bfloat16())
        self.output = normal(sizes.vocab, h, fan=h)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss in nats of the next byte."""
        side, count = self.side, tokens.numel()
        streams = side.expand(self.embedding[tokens].bfloat16())  # [B, L, 4, H]
        streams = self.remember(streams, tokens)
        for layer in self.layers:
            for which, sublayer in enumerate((self.mixer, self.experts)):
                connection = layer.connections[which]
                x, mixes = side.pre(streams, connection.fn, connection.scale, connection.base)
                streams = side.post(sublayer(layer, side.norm(x, layer.norms[which])), streams, *mixes)
        x = side.norm(side.head(streams, self.head.fn, self.head.scale, self.head.base), self.norm)
        logits = x[:, :-1].float() @ self.output.T
        return functional.cross_entropy(logits.reshape(count - len(tokens), -1), tokens[:, 1:].flatten())

    def remember(self, streams: Tensor, tokens: Tensor) -> Tensor:
        """The Engram gate: what the tables hold for the last two and three bytes."""
        table, h = self.sizes.table, self.sizes.hidden
        grams = torch.stack([functional.pad(tokens, (i, 0))[:, : tokens.shape[1]] for i in range(3)], -1)
        grams = grams.view(-1, 3).int()
        multipliers = torch.tensor([[1, 131, 17_161]], device=tokens.device)
        sizes = torch.full((1, 2, 1), table, dtype=torch.int32, device=tokens.device)
        offsets = torch.tensor([[0, table]], dtype=torch.int32, device=tokens.device)
        rows = engram_hash(grams, multipliers, sizes, offsets)[0].long()  # integers: the same on both sides
        memory = self.tables[rows].sum(1).bfloat16().view(*tokens.shape, h)
        k = (memory @ self.keys.bfloat16().T).unflatten(-1, (STREAMS, h))
        v = memory @ self.values.bfloat16().T
        return self.side.engram(streams, k, v, self.weight_hidden, self.weight_embed)

    def mixer(self, layer: nn.Module, x: Tensor) -> Tensor:
        """A causal convolution over the last tokens, and a product; torch on both sides."""
        window, length = self.sizes.window, x.shape[1]
        padded = functional.pad(x, (0, 0, window - 1, 0))
        mixed = sum(padded[:, i : i + length].float() * layer.taps[i] for i in range(window))
        return functional.silu(mixed).bfloat16() @ layer.mix.bfloat16().T

    def experts(self, layer: nn.Module, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        logits = rows.float() @ layer.router.T
        return self.side.experts(rows, logits, layer.up, layer.down, self.sizes.topk).view(x.shape)


def batches(steps: int, sizes: Sizes, device: str) -> list[Tensor]:
    """Pieces of the text, the same on every call."""
    text = torch.tensor(list(TEXT.read_bytes()), dtype=torch.long) % sizes.vocab
    draw = torch.Generator().manual_seed(SEED)
    starts = torch.randint(0, len(text) - sizes.length, (steps, sizes.batch), generator=draw)
    return [torch.stack([text[s : s + sizes.length] for s in row.tolist()]).to(device) for row in starts]


class Trainer:
    """One side: model, optimizer, losses."""

    def __init__(self, side: type[Ours] | type[Plain], sizes: Sizes, lr: float, device: str) -> None:
        torch.manual_seed(SEED)
        self.model = Model(side, sizes).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.losses: list[float] = []
        self.seconds = 0.0

    def step(self, tokens: Tensor) -> float:
        start = time.perf_counter()
        loss = self.model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - start
        return self.losses[-1]


def compare(
    steps: int, sizes: Sizes, lr: float, device: str, on_step: Any = lambda *_: None
) -> tuple[Trainer, Trainer]:
    """Train both sides in turn; (ours, plain)."""
    ours, plain = (Trainer(side, sizes, lr, device) for side in (Ours, Plain))
    for tokens in batches(steps, sizes, device):
        on_step(ours.step(tokens), plain.step(tokens))
    return ours, plain


def differences(ours: Trainer, plain: Trainer) -> list[float]:
    """Relative difference of the losses of every step."""
    return [abs(a - b) / b for a, b in zip(ours.losses, plain.losses, strict=True)]


def plot(ours: Trainer, plain: Trainer, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(plain.losses) + 1)
    top.plot(steps, plain.losses, label="plain torch", color="#9aa5b1", linewidth=4)
    top.plot(steps, ours.losses, label="tk-serving", color="#c2410c", linewidth=1.4)
    top.set_ylabel("loss (nats per byte)")
    top.set_title("Two layers with hyper-connections, Engram and experts in FP8", loc="left")
    top.legend(frameon=False)
    bottom.plot(steps, [100 * d for d in differences(ours, plain)], color="#c2410c", linewidth=1)
    bottom.axhline(1.0, color="#9aa5b1", linewidth=1)
    bottom.set_ylabel("difference (%)")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main(
    steps: Annotated[int, typer.Option(help="training steps")] = 200,
    lr: Annotated[float, typer.Option(help="learning rate")] = 5e-3,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path | None, typer.Option(help="JSON record; the plot lies beside it")] = None,
    tolerance: Annotated[float, typer.Option(help="allowed difference of the losses in a step, relative")] = 0.01,
) -> None:
    """Train twice and fail if the losses of any step differ."""
    if device == "cpu":
        torch.set_num_threads(1)  # tensors this small are not worth sharing
    sizes = Sizes()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[losses]}"), console=console) as progress:
        task = progress.add_task("", total=steps, losses="")

        def on_step(a: float, b: float) -> None:
            progress.update(task, advance=1, losses=f"loss {a:.4f}, plain torch {b:.4f}")

        ours, plain = compare(steps, sizes, lr, device, on_step)
    different = differences(ours, plain)
    worst = max(different)
    for name, side in (("tk-serving", ours), ("plain torch", plain)):
        console.print(f"{name}: loss {side.losses[0]:.4f} to {side.losses[-1]:.4f}")
    console.print(f"Largest difference in a step: {worst:.3%} (step {different.index(worst) + 1})")
    if out:
        record = {
            "device": torch.cuda.get_device_name() if device != "cpu" else f"cpu, {platform.machine()}",
            "driver": driver() if device != "cpu" else "",
            "implementation": "kernels" if device != "cpu" else "torch references",
            "versions": versions(),
            "revision": revision(),
            "date": today(),
            "sizes": asdict(sizes),
            "steps": steps,
            "lr": lr,
            "tolerance": tolerance,
            "largest_difference": worst,
            "seconds": {"tk-serving": ours.seconds, "plain torch": plain.seconds},
            "losses": {"tk-serving": ours.losses, "plain torch": plain.losses},
        }
        out.write_text(json.dumps(record, indent=1) + "\n")
        try:
            plot(ours, plain, out.with_suffix(".png"))
        except ModuleNotFoundError:
            console.print("No plot: matplotlib is not installed.")
        console.print(f"Record: {out}")
    if worst > tolerance:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
