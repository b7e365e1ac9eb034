"""Ours and the peers behind one interface: compared with the reference first, then ready to be timed."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tk_serving import dispatch
from tk_serving.bench import peers
from tk_serving.bench.agreement import Agreement, compare, written
from tk_serving.bench.inputs import Inputs
from tk_serving.bench.peers import COMPILED, REFERENCE, PeerCall, PeerUnavailableError
from tk_serving.bench.selection import Task
from tk_serving.bench.timing import Footprint, Sampler, Timer

log = logging.getLogger(__name__)

OURS = "tk-serving"
UNUSED_BYTES = 4 << 30
"""So much memory may stay reserved while nothing uses it."""


class DeviceLostError(RuntimeError):
    """An implementation left the device unusable; nothing more can be measured in this process."""


@dataclass
class Ready:
    """An implementation of one row that can be timed."""

    sampler: Sampler
    agreement: Agreement
    note: str = ""


class Subject:
    """One row on one device: its inputs, its expected results, and the calls of any implementation on them."""

    def __init__(self, task: Task, device: str) -> None:
        self.task, self.device = task, device
        self.inputs = Inputs(task, device)

    def maker(self, name: str) -> Callable[[tuple], PeerCall]:
        """``maker(name)(arguments)`` is the prepared call of an implementation.

        Raises:
            PeerUnavailableError: with the reason; so may the maker.
        """
        op = self.task.op
        if name == OURS:
            positional, keywords = self._by_kind(self.inputs[0])
            refusal = op.refusal(*positional, **keywords)
            if refusal and self.device != "cpu":
                raise PeerUnavailableError(f"no kernel for this call: {refusal}")
            return functools.partial(self._direct, op.public)
        if name == REFERENCE:
            return functools.partial(self._direct, op.reference)
        if name == COMPILED:
            return functools.partial(self._direct, _compiled(op.name, repr(sorted(self.task.params.items()))))
        return lambda args: peers.prepare(name, op.name, self.inputs.by_name(args))

    @functools.cached_property
    def footprint(self) -> Footprint:
        """What a call takes, and moves."""
        return Footprint(self.task.op.compulsory_bytes(*self.inputs[0]), self.inputs.num_bytes)

    def agreement(self, name: str, make: Callable[[tuple], PeerCall]) -> Agreement:
        """Whether an implementation delivers what the reference delivers, on inputs of its own."""
        args = self.inputs.fresh()
        call = make(args)
        if call.result is None:
            return Agreement(None, f"not compared: {call.note}")
        op, expected = self.task.op, self._expected
        actual = written(op, args, call.result(call.run()))
        if name != OURS and op.num_results:
            # A peer delivers results; what an operator writes into its arguments besides is ours alone.
            actual, expected = actual[: op.num_results], expected[: op.num_results]
        return compare(op, actual, expected, peer=name != OURS)

    @functools.cached_property
    def _expected(self) -> list[Any]:
        args = self.inputs.fresh()
        positional, keywords = self._by_kind(args)
        return written(self.task.op, args, self.task.op.call(dispatch.REFERENCE, *positional, **keywords))

    def _direct(self, function: Callable[..., Any], args: tuple) -> PeerCall:
        positional, keywords = self._by_kind(args)
        return PeerCall(functools.partial(function, *positional, **keywords))

    def _by_kind(self, args: tuple) -> tuple[list[Any], dict[str, Any]]:
        return dispatch.args_by_kind(self.task.op, args)


class Bench:
    """Prepares implementations on one device of this process; holds one row at a time."""

    def __init__(self, timer: Timer, device: str = "cuda", check: bool = True) -> None:
        self.timer, self.device, self.check = timer, device, check
        self._subject: Subject | None = None

    def start(self, task: Task) -> Subject:
        """The row on the device; made anew unless it is the current one."""
        if self._subject is None or self._subject.task is not task:
            self.finish()
            self._subject = Subject(task, self.device)
        return self._subject

    def finish(self) -> None:
        """Free the current row."""
        self._subject = None
        self.trim()

    def trim(self) -> None:
        """Return unused memory to the device: also that of destroyed graphs stays reserved until then."""
        if self.device != "cpu" and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > UNUSED_BYTES:
            torch.cuda.empty_cache()

    def no_memory(self, error: Exception) -> str:
        """Why a row does not fit, and who has the memory; what it took is free afterwards."""
        wanted = re.search(r"allocate ([\d.]+ \w+)", str(error))
        if self.device == "cpu":
            return "no memory"
        own = torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        torch.cuda.empty_cache()
        gib = [f"{size / 2**30:.1f}" for size in (free, total, own, max(0, total - free - own))]
        text = "no memory: {} GiB of {} are free, this process has {}, others and the driver {}".format(*gib)
        return f"{text}; the row asked for {wanted[1]} more" if wanted else text

    def prepare(self, name: str, task: Task, mode: str) -> Ready:
        """Compare an implementation with the reference and make it ready.

        Raises:
            PeerUnavailableError: with the reason.
            DeviceLostError: the device is unusable now.
        """
        subject = self.start(task)
        try:
            make = subject.maker(name)
            note = make(subject.inputs[0]).note
            agreement = subject.agreement(name, make) if self.check else Agreement(None, "not compared")
            self.trim()  # what the comparison took
            sampler = self.timer.prepare(lambda index: make(subject.inputs[index]).run, mode, subject.footprint)
        except PeerUnavailableError:
            raise
        except torch.OutOfMemoryError as error:
            raise PeerUnavailableError(self.no_memory(error)) from error
        except Exception as error:
            if name == OURS:
                log.warning("%s fails", task, exc_info=True)
            self.survive(error)
            raise PeerUnavailableError(f"fails with {type(error).__name__}: {peers.first_line(error)}") from error
        return Ready(sampler, agreement, note)

    def survive(self, error: Exception) -> None:
        """Raise DeviceLostError if the device does not answer after this error."""
        if self.device == "cpu":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as dead:
            lost = f"the device no longer answers: {peers.first_line(dead)}"
            raise DeviceLostError(f"{peers.first_line(error)}; {lost}") from error


@functools.cache
def _compiled(operator: str, params: str) -> Callable[..., Any]:
    """The reference through torch.compile; afresh for each parameter set: past its recompile limit it runs eagerly."""
    from tk_serving.operator import find

    torch._dynamo.reset()
    return torch.compile(find(operator).reference)
