"""Engines that cannot share a process with ours: other versions of TileLang or torch, in a folder of their own.

The parent sends one JSON object in a line, the worker answers with one. Only one of the two is busy at any time, so
samples of both processes alternate like those of one. The worker makes the same inputs from the same seed and compares
with the reference itself: no tensor crosses the process boundary.

    python -m tk_serving.bench.worker ENGINE
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tk_serving.bench.agreement import Agreement
from tk_serving.bench.implementations import Bench, DeviceLostError, Ready
from tk_serving.bench.peers import PeerUnavailableError, first_line
from tk_serving.bench.selection import Task

ANSWER_SECONDS = 180.0
MAX_STARTS = 6


class Remote:
    """An engine in a process of its own; started by the first call."""

    def __init__(self, site: str = "", check: bool = True, device: str = "cuda") -> None:
        self._site, self.check, self._device = site, check, device
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._lost = ""
        self._starts = 0
        self.versions: dict[str, str] = {}

    def prepare(self, peer: str, task: Task, mode: str) -> Ready:
        """As :meth:`Bench.prepare`, in the other process."""
        index = task.op.workloads.index(task.workload)
        row = {"operator": task.op.qualified_name, "workload": index, "tokens": task.tokens}
        answer = self._ask("prepare", peer=peer, mode=mode, check=self.check, **row)
        return Ready(
            _RemoteSampler(self, answer["identity"], answer["method"]), Agreement(*answer["agreement"]), answer["note"]
        )

    def finish(self) -> None:
        """Let the process free the inputs of the current row; one that was lost starts again with the next row."""
        if self._lost and self._starts < MAX_STARTS:
            self._process, self._lost = None, ""
        if self._process is not None and not self._lost:
            self._ask("finish")

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        if self._lost:
            raise PeerUnavailableError(self._lost)
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"command": command, **arguments}), file=self._process.stdin, flush=True)
            ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
            line = self._process.stdout.readline() if ready else ""
        except OSError:
            line = ""
        if not line:
            self.close()
            self._lost = f"its process ended: {self._last_words()}"
            raise PeerUnavailableError(self._lost)
        answer = json.loads(line)
        if "absent" in answer:
            raise PeerUnavailableError(answer["absent"])
        return answer

    def _start(self) -> None:
        self._starts += 1
        self._log.seek(0)
        self._log.truncate()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(p for p in (self._site, root, os.environ.get("PYTHONPATH", "")) if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tk_serving.bench.worker", self._device],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        atexit.register(self.close)
        with contextlib.suppress(PeerUnavailableError):  # if that fails, preparing says why
            self.versions = self._ask("versions")["versions"]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else "no message"


class _RemoteSampler:
    def __init__(self, remote: Remote, identity: int, method: str) -> None:
        self._remote, self._identity, self.method = remote, identity, method

    def sample(self) -> float:
        return self._remote._ask("sample", identity=self._identity)["us"]

    def release(self) -> None:
        self._remote._ask("release", identity=self._identity)


class _Server:
    def __init__(self, device: str) -> None:
        self._device = device
        self._bench: Bench | None = None
        self._ready: dict[int, Ready] = {}
        self._tasks: dict[tuple, Task] = {}

    def versions(self) -> dict[str, Any]:
        from tk_serving.bench.record import versions

        return {"versions": versions()}

    def prepare(self, peer: str, operator: str, workload: int, tokens: int, mode: str, check: bool) -> dict[str, Any]:
        from tk_serving.operator import find

        op = find(operator)
        task = self._tasks.setdefault((operator, workload, tokens), Task(op, op.workloads[workload], tokens))
        try:
            bench = self._own()
            bench.check = check
            ready = bench.prepare(peer, task, mode)
        except PeerUnavailableError as reason:
            return {"absent": str(reason)}
        identity = len(self._ready)
        self._ready[identity] = ready
        agreement = [ready.agreement.kind, ready.agreement.difference]
        return {"identity": identity, "method": ready.sampler.method, "agreement": agreement, "note": ready.note}

    def sample(self, identity: int) -> dict[str, Any]:
        return {"us": self._ready[identity].sampler.sample()}

    def release(self, identity: int) -> dict[str, Any]:
        self._ready[identity].sampler.release()
        return {}

    def finish(self) -> dict[str, Any]:
        self._ready.clear()
        if self._bench is not None:
            self._bench.finish()
        return {}

    def _own(self) -> Bench:
        if self._bench is None:
            import torch

            from tk_serving.bench.timing import CudaTimer, HostTimer

            timer = HostTimer() if self._device == "cpu" else CudaTimer(self._device)
            torch.set_grad_enabled(False)
            self._bench = Bench(timer, self._device)
        return self._bench


def serve(device: str) -> None:
    """Answer requests from standard input until it closes."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # engines print
    server = _Server(device)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("command"))(**request)
        except DeviceLostError as error:
            print(f"{error}", file=sys.stderr, flush=True)
            sys.exit(1)
        except Exception as error:
            answer = {"absent": f"fails with {type(error).__name__}: {first_line(error)}"}
        print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
