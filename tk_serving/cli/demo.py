"""``tk-serving demo``: a tiny DeepSeek model on the real engine, with and without the flag."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    engine: Annotated[str, typer.Option(help="Serving engine: vllm or sglang.")] = "vllm",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="On a CPU, run the generated CUDA in the simulator.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoint and the server logs.")] = False,
) -> None:
    """Serve a tiny DeepSeek-V3 with and without --kernel-backend tilekernels and compare the answers."""
    from tk_serving.demo import run

    raise typer.Exit(run(engine=engine, simulate=simulate, keep=keep))
