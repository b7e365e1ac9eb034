"""What the host does for a call of an operator, without a GPU: ``python -m tk_serving.bench.calls [MODEL] [TOKENS]``.

Calls go the way of an engine's adapter, from the arguments to the launch, with a launch that does nothing and outputs
in the host's memory. The times are CPU time of the thread, and say nothing of kernels.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from tk_serving import dispatch, kept, operator
from tk_serving.compile import kernels
from tk_serving.config import settings
from tk_serving.plan import Out
from tk_serving.workloads import MODELS, Maker

ENGINES = ("vllm", "sglang")
REPEAT, ROUNDS = 200, 7


@contextmanager
def launches_left_out() -> Iterator[Any]:
    """A device that looks like a GPU, on which launches do nothing; yields it."""
    device = SimpleNamespace(type="cuda", index=0)
    empty = Out.empty
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(dispatch, "_capability", _always((9, 0))),
            mock.patch.object(kernels, "load", _always(_nothing)),
            mock.patch.object(operator, "_device", _always(device)),
            mock.patch.object(Out, "empty", lambda self, _: empty(self, torch.device("cpu"))),
            mock.patch.object(torch.cuda, "device", _always(nullcontext())),
            mock.patch.object(torch.cuda, "current_device", _always(0)),
        ):
            stack.enter_context(patch)
        stack.callback(kept.forget)  # plans with these launches
        kept.forget()
        yield device


def _always(value: Any) -> Callable[..., Any]:
    """A function, as a mock takes longer than what is timed."""
    return lambda *_: value


def _nothing(*_: Any) -> None:
    pass


def microseconds(call: Callable[[], Any]) -> float:
    """CPU time of this thread for one call: the median of several rounds."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(REPEAT):
            call()
        rounds.append((time.thread_time() - start) / REPEAT * 1e6)
    return statistics.median(rounds)


def rows(model: str, tokens: int) -> Iterator[tuple[str, float, float]]:
    """For each operator that engines call: its name, microseconds to decide whether a kernel runs, and to run it."""
    from tk_serving_patches.calls import ask

    with launches_left_out() as device, torch.inference_mode():
        for op in operator.operators():
            forms = [w for w in op.built if w.model == model]
            if not set(ENGINES) & {peer.partition(":")[0] for peer in op.peers} or not forms:
                continue
            args = op.inputs(Maker("cpu"), tokens=tokens, **forms[0].params)
            answer = ask(op.public, device, *args)
            if isinstance(answer, str):
                continue
            yield (
                op.name,
                microseconds(functools.partial(ask, op.public, device, *args)),
                microseconds(answer),
            )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tk_serving.bench.calls", description=__doc__)
    parser.add_argument("model", nargs="?", default="v4-flash", choices=[model.key for model in MODELS])
    parser.add_argument("tokens", nargs="?", type=int, default=512)
    options = parser.parse_args(arguments)
    model, tokens = options.model, options.tokens
    table = Table("operator", "decide, us", "run, us", title=f"host, {model}, {tokens} tokens; jit {settings.jit}")
    for name, decide, run in rows(model, tokens):
        table.add_row(name, f"{decide:.1f}", f"{run:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
