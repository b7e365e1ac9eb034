"""FP4 experts with FP8 activations, every mode of ``TK_SERVING_EXPERTS`` beside the engine and beside our side with the
engine's experts: outputs, then prompts on both sides of the thresholds, and decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from tk_serving.bench.e2e import alternate
from tk_serving.bench.e2e.alternate import EngineError, Kind, Options, Side

FROM = {"resident": 512, "upcast": 2048}
"""Tokens of a step from which on these modes run in FP8 here: below the thresholds, to see where they cross."""

MODES = {
    mode: Kind(
        "tilekernels",
        environment={"TK_SERVING_EXPERTS": mode, "TK_SERVING_EXPERTS_MIN_TOKENS": str(FROM.get(mode, 0))},
    )
    for mode in ("w4a8", "resident", "upcast")
}
OWN = "engine's experts"  # our side, with these
SIZES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 16384)
"""Tokens of prompts, besides the long one of the options."""

TEXTS = {"sequences": 64, "prompt": 512, "tokens": 1}  # steps of 8192 tokens
DAMPINGS = (*alternate.DAMPINGS, 9)


def wait_and_measure(sides: dict[str, Side], options: Options, record: dict[str, Any], console: Console) -> None:
    """Measure the modes whose engines start."""
    started = {}
    for mode in MODES:
        try:
            sides[mode].answer(options.start_limit)
            started[mode] = sides[mode]
        except EngineError as error:
            console.print(f"experts {mode}: {error}")
    measure(started, sides["stock"], sides["ours"], options, record, console)


def measure(
    modes: Mapping[str, Side],
    stock: Side,
    ours: Side,
    options: Options,
    record: dict[str, Any],
    console: Console,
) -> None:
    """All rows, into a record of their own, which is written after each phase.

    Args:
        modes: engines by mode.
        stock: the engine without us.
        ours: our side with the engine's experts.
        options: of the run.
        record: what all records of this run say.
        console: for progress.
    """
    own = {**record, "rows": [], "from_tokens": FROM}
    apart = alternate.compare(modes, stock, options, TEXTS, DAMPINGS, DAMPINGS)
    for mode, found in apart.items():
        console.print(f"experts {mode}: outputs {found}")
    everyone = {"stock": stock, OWN: ours, **modes}
    for phase, size in phases(options):
        found = alternate.measured(everyone, options, phase, size)
        for mode in modes:
            three = {"stock": found["stock"], "ours": found[mode], OWN: found[OWN]}
            row = alternate.row(three, options, phase, size)
            row["phase"] += f", experts {mode}"
            own["rows"].append({**row, **apart[mode]})
            console.print(f"{alternate._line(row)}; with the engine's experts {row[OWN]:.3f} ms")
        own["engines"] = {options.name: {name: side.do("state") for name, side in everyone.items() if name != "stock"}}
        alternate._write(own, options.experts, options.name)


def phases(options: Options) -> list[tuple[str, int]]:
    """What tells most comes first."""
    decode = [("decode", size) for size in sorted(options.sizes, reverse=True)]
    return [("prefill", options.prefill), *decode, *(("prefill", size) for size in SIZES)]
