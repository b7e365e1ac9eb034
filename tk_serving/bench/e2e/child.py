"""One engine in a process of its own: takes commands as JSON lines on stdin, answers with marked JSON lines.

The engine runs in this very process, so that its kernels can be profiled and its steps timed on the device.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tk_serving.bench.e2e.engine import Engine

MARK = "@@"  # before an answer; everything else on stdout is the engine's log


def build(settings: dict[str, Any]) -> Engine:
    """The engine that the settings name."""
    if settings.get("engine", "vllm") == "sglang":
        from tk_serving.bench.e2e.sglang import SGLang

        return SGLang(settings)
    from tk_serving.bench.e2e.vllm import Parallel, Vllm

    return (Parallel if settings["arguments"].get("tensor_parallel_size", 1) > 1 else Vllm)(settings)


def main() -> None:
    """Build the engine of the first line, then obey the following ones until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints must not mix with the answers

    def answer(value: Any) -> None:
        answers.write(MARK + json.dumps(value) + "\n")

    def attempt(action: Callable[[], Any]) -> None:
        try:
            answer({"value": action()})
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"[:2000]})

    settings = json.loads(sys.stdin.readline())
    Path(settings["folder"], "generation_config.json").write_text("{}")
    engine: list[Engine] = []
    attempt(lambda: engine.append(build(settings)))
    for line in sys.stdin:
        command = json.loads(line)
        attempt(lambda: getattr(engine[0], command.pop("do"))(**command))  # noqa: B023


if __name__ == "__main__":
    main()
