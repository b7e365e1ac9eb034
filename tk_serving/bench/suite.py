"""Measure rows one after another and write down what was found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tk_serving.bench import peers
from tk_serving.bench.implementations import OURS, Bench, DeviceLostError, Ready
from tk_serving.bench.peers import TORCH, PeerUnavailableError, engine_of, engines
from tk_serving.bench.record import PeerResult, Row
from tk_serving.bench.selection import Task
from tk_serving.bench.timing import SampleError, Statistics, measure
from tk_serving.bench.worker import Remote

NO_PEERS = "none"


class Preparer(Protocol):
    def prepare(self, name: str, task: Task, mode: str) -> Ready: ...

    def finish(self) -> None: ...


@dataclass
class Suite:
    """The benchmark of one process, with the engines that need processes of their own.

    Attributes:
        bench: prepares what runs in this process.
        wanted: engines to compare with; all that the operators declare if empty.
        sites: engine -> folder that is put first on the import path of a process of its own.
        rounds: samples of each implementation of a row.
    """

    bench: Bench
    copy_gbps: float
    wanted: Sequence[str] = ()
    sites: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 16
    remotes: dict[str, Remote] = field(default_factory=dict)

    def run(self, tasks: Sequence[Task], modes: Sequence[str], seen: Callable[[Row], None]) -> None:
        """Measure all rows; ``seen`` gets each row when it is done.

        Raises:
            DeviceLostError: the rest could not be measured.
        """
        for task in tasks:
            for mode in modes:
                seen(self.measure(task, mode))
            self._finish()

    def peers_of(self, task: Task) -> list[str]:
        """The peers to measure for a row, in the order of declaration."""
        declared = [*task.op.peers, *TORCH]
        return [peer for peer in declared if not self.wanted or engine_of(peer) in self.wanted]

    def measure(self, task: Task, mode: str) -> Row:
        """One row; what fails is part of it.

        Raises:
            DeviceLostError: the device is unusable; the row is lost, too.
        """
        row = row_of(task, mode)
        try:
            row.bytes = task.op.compulsory_bytes(*self.bench.start(task).inputs[0])
        except torch.OutOfMemoryError as error:
            row.error = self.bench.no_memory(error)
            return row
        except Exception as error:
            row.error = f"no inputs: {type(error).__name__}: {peers.first_line(error)}"
            return row
        ready: dict[str, Ready] = {}
        try:
            self._prepare(task, mode, row, ready)
            timed = self._time(row, ready)
        finally:
            for one in ready.values():
                with contextlib.suppress(RuntimeError, PeerUnavailableError):
                    one.sampler.release()
        targets: dict[str, Row | PeerResult] = {OURS: row, **{peer.name: peer for peer in row.peers}}
        for name, statistics in timed.items():
            target = targets[name]
            target.us, target.p10, target.p90 = statistics.median, statistics.p10, statistics.p90
        row.conclude(self.copy_gbps)
        return row

    def preparer(self, peer: str) -> Preparer:
        """This process, or the one of the engine."""
        engine = engine_of(peer)
        if engine in TORCH or engine not in engines():
            return self.bench
        own = engine in self.sites or getattr(peers.engine_module(engine), "OWN_PROCESS", False)
        if not own:
            return self.bench
        if engine not in self.remotes:
            self.remotes[engine] = Remote(self.sites.get(engine, ""), self.bench.check, self.bench.device)
        return self.remotes[engine]

    def versions(self) -> dict[str, str]:
        """Versions in the processes of the engines, each under the engine's name."""
        return {
            f"{engine}: {name}": version
            for engine, remote in self.remotes.items()
            for name, version in remote.versions.items()
            if name not in ("tk-serving", "python")
        }

    def close(self) -> None:
        for remote in self.remotes.values():
            remote.close()

    def _prepare(self, task: Task, mode: str, row: Row, ready: dict[str, Ready]) -> None:
        try:
            ours = ready[OURS] = self.bench.prepare(OURS, task, mode)
            row.method = ours.sampler.method
            row.agreement, row.difference = ours.agreement.kind, ours.agreement.difference
        except PeerUnavailableError as reason:
            row.error = str(reason)
        for name in self.peers_of(task):
            result = PeerResult(name)
            row.peers.append(result)
            try:
                one = ready[name] = self.preparer(name).prepare(name, task, mode)
            except PeerUnavailableError as reason:
                result.absent = str(reason)
                continue
            result.method, result.note = one.sampler.method, one.note
            result.agreement, result.difference = one.agreement.kind, one.agreement.difference

    def _time(self, row: Row, ready: dict[str, Ready]) -> dict[str, Statistics]:
        """Time what is ready; an implementation that fails meanwhile is left out, and the others are timed again."""
        samplers = {name: one.sampler for name, one in ready.items()}
        while samplers:
            try:
                return measure(samplers, self.rounds)
            except SampleError as failed:
                self.bench.survive(failed)
                del samplers[failed.name]
                if failed.name == OURS:
                    row.error = f"fails while it is timed: {peers.first_line(failed)}"
                for peer in row.peers:
                    if peer.name == failed.name:
                        peer.absent = f"fails while it is timed: {peers.first_line(failed)}"
        return {}

    def _finish(self) -> None:
        self.bench.finish()
        for remote in self.remotes.values():
            try:
                remote.finish()
            except PeerUnavailableError:
                continue  # its next row reports the reason


def row_of(task: Task, mode: str) -> Row:
    """The row of a task before anything was measured."""
    plain = (int, float, str, bool, type(None))
    params = {key: value if isinstance(value, plain) else str(value) for key, value in task.params.items()}
    row = Row(task.op.qualified_name, task.workload.label, task.tokens, mode)
    row.model, row.params = task.workload.model, params
    return row


__all__ = ["NO_PEERS", "DeviceLostError", "Preparer", "Suite", "row_of"]
