"""Counters of a server with several processes: operator calls, and kernels that had to be compiled.

Every process that runs operators writes what it counted, and what it reports of its call sites, to a file of its own
in ``TK_SERVING_STATE_DIR``; whoever wants the sum reads the folder. :class:`Collector` shows it to Prometheus.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tk_serving import dispatch
from tk_serving.compile import kernels

INTERVAL_S = 1.0
_PREFIX = "tk-serving-"

_writer: _Writer | None = None


class _Writer:
    """Keeps the file of this process up to date."""

    def __init__(self, folder: str, sites: Callable[[], list[dict[str, str]]]) -> None:
        self.pid = os.getpid()
        self._path = Path(folder) / f"{_PREFIX}{self.pid}.json"
        self._sites = sites
        self._last = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="tk-serving-metrics", daemon=True).start()
        atexit.register(self.write)
        Finalize(None, self.write, exitpriority=0)  # forked children of multiprocessing skip atexit

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.write()

    def write(self) -> None:
        if os.getpid() != self.pid:
            return
        state = {
            "pid": self.pid,
            "process": multiprocessing.current_process().name,
            "counters": dispatch.counters(),
            "compilations": kernels.compilations(),
            "sites": self._sites(),
        }
        text = json.dumps(state)
        with self._lock:
            if text == self._last:
                return
            temporary = self._path.with_suffix(".tmp")
            try:
                temporary.write_text(text)
                temporary.replace(self._path)
            except FileNotFoundError:  # the folder went with the server that made it
                return
            self._last = text

    def close(self) -> None:
        self._stop.set()
        self.write()


def publish(folder: str, sites: Callable[[], list[dict[str, str]]] = list) -> None:
    """Share the counters of this process through a folder from now on, about once a second and at exit.

    Args:
        folder: the state folder; made if it does not exist.
        sites: gives the rows of the site report of this process.
    """
    global _writer
    if _writer is not None and _writer.pid == os.getpid():
        _writer.write()
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    _writer = _Writer(folder, sites)
    _writer.write()


def flush() -> None:
    """Write now what this process shares."""
    if _writer is not None:
        _writer.write()


def states(folder: str) -> list[dict[str, Any]]:
    """What every process shares: ``pid``, ``process``, ``counters``, ``compilations`` and ``sites``."""
    found = []
    for path in sorted(Path(folder).glob(f"{_PREFIX}*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return found


def totals(folder: str) -> list[dict[str, Any]]:
    """Calls of all processes together, in the form of :func:`tk_serving.dispatch.counters`."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for state in states(folder):
        for row in state["counters"]:
            sums[row["operator"], row["implementation"], row["reason"]] += row["calls"]
    return [
        {"operator": operator, "implementation": implementation, "reason": reason, "calls": calls}
        for (operator, implementation, reason), calls in sorted(sums.items())
    ]


def compilations(folder: str) -> list[dict[str, Any]]:
    """Kernels compiled by all processes, in the form of :func:`tk_serving.compile.kernels.compilations`."""
    count: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for state in states(folder):
        for row in state.get("compilations", ()):
            count[row["kernel"]] += row["compilations"]
            seconds[row["kernel"]] += row["seconds"]
    return [{"kernel": kernel, "compilations": count[kernel], "seconds": seconds[kernel]} for kernel in sorted(count)]


def clear(folder: str) -> None:
    """Remove the files of processes that have ended, so that an earlier run is not counted."""
    for path in Path(folder).glob(f"{_PREFIX}*.json"):
        pid = path.stem.removeprefix(_PREFIX)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


class Collector:
    """A collector for ``prometheus_client``; :meth:`describe` names the metrics.

    ``tk_serving_fallbacks_total`` repeats those calls of ``tk_serving_calls_total`` that no kernel ran, for alerts that
    know nothing of implementations.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def describe(self) -> list[Any]:
        """The metrics without samples. ``prometheus_client`` asks at registration."""
        from prometheus_client.core import CounterMetricFamily

        calls = ("operator", "implementation", "reason")
        return [
            CounterMetricFamily(
                "tk_serving_calls", "Operator calls by implementation; a replayed CUDA graph counts once", labels=calls
            ),
            CounterMetricFamily(
                "tk_serving_fallbacks",
                "Operator calls that ran the engine's code or the torch reference instead of a kernel",
                labels=("operator", "reason"),
            ),
            CounterMetricFamily(
                "tk_serving_jit_compilations",
                "Kernels compiled while serving, not built ahead",
                labels=("kernel",),
            ),
            CounterMetricFamily(
                "tk_serving_jit_compilation_seconds", "Time that those compilations took", labels=("kernel",)
            ),
        ]

    def collect(self) -> Iterator[Any]:
        calls, fallbacks, compiled, seconds = self.describe()
        without_kernel: Counter[tuple[str, str]] = Counter()
        for row in totals(self._folder):
            calls.add_metric([row["operator"], row["implementation"], row["reason"]], row["calls"])
            if row["implementation"] in (dispatch.REFERENCE, dispatch.ENGINE):
                without_kernel[row["operator"], row["reason"]] += row["calls"]
        for labels, count in sorted(without_kernel.items()):
            fallbacks.add_metric(labels, count)
        for row in compilations(self._folder):
            compiled.add_metric([row["kernel"]], row["compilations"])
            seconds.add_metric([row["kernel"]], row["seconds"])
        yield from (calls, fallbacks, compiled, seconds)
