"""Every call site against SGLang's own kernel on this GPU: do they agree, and which is faster.

``python -m tk_serving_sglang.measure RECORD [--jobs N] [--limit SECONDS]`` writes a record, from which
``python -m tk_serving_sglang.table RECORD`` makes the table of the sites that stay with SGLang. With ``--jobs`` that
many processes first run every call once, so that kernels which are compiled at their first call are compiled at once.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tk_serving.bench.peers.sglang import publish
from tk_serving_patches import Ledger
from tk_serving_patches import warm as warm_calls
from tk_serving_sglang.cases import CASES, DEVICE, TOKENS, Case

ROUNDS = 4
CALLS = 20


def prepare() -> None:
    """What SGLang's kernels ask for outside an engine, with the choice of a backend that our plugin adds."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    publish(DEVICE, kernel_backend="auto")


def calls(case: Case, model: Any, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same call of SGLang's function and of its replacement.

    Raises:
        RuntimeError: the site cannot be applied, or leaves this call to SGLang.
    """
    module, _, name = case.target.partition(":")
    owner = importlib.import_module(module)
    site = case.site
    run = case.make(model, tokens, torch.Generator(DEVICE).manual_seed(0))
    theirs = functools.partial(run, getattr(owner, name))
    ledger = Ledger()
    applied = ledger.apply(site)[0]
    if applied.status != "patched":
        raise RuntimeError(f"{applied.status}: {applied.reason}")
    try:
        ours = functools.partial(run, getattr(owner, name))
    finally:
        ledger.revert()
    return theirs, ours


def compare(case: Case, theirs: Any, ours: Any) -> float:
    """The largest difference of the results, relative to the largest value of SGLang's."""
    worst = 0.0
    for one, two in zip(case.values(theirs), case.values(ours), strict=True):
        size = one.abs().max().clamp(min=1e-20)
        worst = max(worst, ((one - two).abs().max() / size).item())
    return worst


def clone(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.clone()
    return type(result)(clone(r) for r in result) if isinstance(result, (tuple, list)) else result


def microseconds(call: Callable[[], Any]) -> Callable[[], float]:
    """A function that measures one call, by replays of a CUDA graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()

    def measure(_call: Callable[[], Any] = call) -> float:  # the graph reads its tensors, which must live as long
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3 / CALLS

    return measure


def row(case: Case, model: Any, tokens: int) -> dict[str, Any]:
    """One line of the record; ``error`` says why there are no numbers."""
    from tk_serving import dispatch

    found: dict[str, Any] = {"site": case.site.name, "case": case.name, "model": model.key, "tokens": tokens}
    try:
        theirs, ours = calls(case, model, tokens)
        dispatch.reset_counters()
        mine = clone(ours())
        left = sorted({c["reason"] for c in dispatch.counters() if c["implementation"] != "kernel" and c["calls"]})
        if left:
            raise RuntimeError("left to SGLang: " + "; ".join(left))
        found["difference"] = round(compare(case, clone(theirs()), mine), 6)
        found["agree"] = found["difference"] <= case.tolerance
        sides = {"stock": microseconds(theirs), "ours": microseconds(ours)}
        samples: dict[str, list[float]] = {"stock": [], "ours": []}
        for i in range(ROUNDS):
            for side in ("stock", "ours") if i % 2 == 0 else ("ours", "stock"):
                samples[side].append(sides[side]())
        found |= {f"{side}_us": round(statistics.median(s), 3) for side, s in samples.items()}
        found["ratio"] = round(found["stock_us"] / found["ours_us"], 3)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
        found["traceback"] = traceback.format_exc()[-1500:]
    return found


def chosen() -> Iterator[tuple[Case, Any, int]]:
    from tk_serving.workloads import MODELS

    for case in CASES:
        for model in MODELS:
            if model.key in case.models:
                yield from ((case, model, tokens) for tokens in TOKENS)


def _once(part: int, parts: int) -> list[str]:
    """Run every parts-th call once, on both sides, and compile ours for other token counts; what went wrong."""
    prepare()
    warm_calls.start()
    wrong = []
    for case, model, tokens in list(chosen())[part::parts]:
        for side in (0, 1):
            try:
                calls(case, model, tokens)[side]()
                torch.cuda.synchronize()
            except Exception as error:
                wrong.append(f"{case.name} {model.key} {tokens} {('stock', 'ours')[side]}: {error}"[:300])
    warm_calls.run(warm_calls.counts(8192), torch.device("cuda", torch.cuda.current_device()))
    return wrong


def warm(jobs: int) -> None:
    """Compile in parallel what is compiled at its first call."""
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for wrong in pool.starmap(_once, [(i, jobs) for i in range(jobs)], chunksize=1):
            for line in wrong:
                print("warm:", line, flush=True)
    print(f"every call ran once after {time.monotonic() - started:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure; 1 if a site disagrees with SGLang or could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further call is measured")
    parser.add_argument("--revision", default="")
    chosen_options = parser.parse_args(arguments)
    started = time.monotonic()
    if chosen_options.jobs:
        warm(chosen_options.jobs)
    prepare()
    from tk_serving.bench.record import versions
    from tk_serving.environment import revision

    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "revision": chosen_options.revision or revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "unit": f"us for one call: median of {ROUNDS} replays of a CUDA graph of {CALLS} calls on the same tensors",
        "rows": [],
    }
    print(f"{'case':26}{'model':10}{'tokens':>7}{'stock us':>10}{'ours us':>9}{'ratio':>7}  difference", flush=True)
    for case, model, tokens in chosen():
        if time.monotonic() - started > chosen_options.limit:
            record["aborted"] = f"after {chosen_options.limit:.0f} s"
            chosen_options.record.write_text(json.dumps(record, indent=1) + "\n")
            break
        found = row(case, model, tokens)
        record["rows"].append(found)
        head = f"{case.name:26}{model.key:10}{tokens:>7}"
        if "error" in found:
            print(f"{head}  {found['error'][:140]}", flush=True)
        else:
            times = f"{found['stock_us']:>10.2f}{found['ours_us']:>9.2f}{found['ratio']:>7.2f}"
            print(f"{head}{times}  {found['difference']:.2g}{'' if found['agree'] else '  DISAGREE'}", flush=True)
        chosen_options.record.write_text(json.dumps(record, indent=1) + "\n")
    return int(any("error" in found or not found["agree"] for found in record["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
