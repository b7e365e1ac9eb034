"""``vllm bench latency`` and ``throughput`` on the engines that take turns here, instead of on engines of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tk_serving.bench.e2e.alternate import Side

_SHORT = ("--input-len", "32", "--output-len", "64", "--num-iters-warmup", "1", "--num-iters", "5")
COMMANDS: dict[str, tuple[str, ...]] = {
    **{f"latency, batch size {size}": ("latency", "--batch-size", str(size), *_SHORT) for size in (1, 8, 64)},
    "throughput": (
        *("throughput", "--dataset-name", "random", "--num-prompts", "128"),
        *("--random-input-len", "1024", "--random-output-len", "64"),
    ),
}
"""By name: the command with its arguments."""

RESULTS = {"latency": ("avg_latency", "s", min), "throughput": ("tokens_per_second", "tokens/s", max)}
"""Of a command: the number of its results, its unit, and which of several runs is the best one."""


def vllm_bench(sides: Mapping[str, Side], until: float = float("inf")) -> dict[str, Any]:
    """Stock, ours, ours, stock; for each command the better one of the two runs of a side, and ``ratio`` (above 1, ours
    is faster). Clock times: they have all that the host does. After ``until`` of the clock no further command begins.
    """
    found: dict[str, Any] = {}
    for name, (command, *arguments) in COMMANDS.items():
        if time.time() > until:
            break
        key, unit, best = RESULTS[command]
        runs: dict[str, list[float]] = {"stock": [], "ours": []}
        for side in ("stock", "ours", "ours", "stock"):
            runs[side].append(sides[side].do("bench", command=command, arguments=arguments)[key])
        stock, ours = best(runs["stock"]), best(runs["ours"])
        ratio = stock / ours if best is min else ours / stock
        shown = {"stock": stock, "ours": ours, "unit": unit, "ratio": round(ratio, 4), "runs": runs}
        found[name] = {"arguments": list(arguments), **shown}
    return found
