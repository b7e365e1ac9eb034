"""How long a call takes on the device.

A sample is one replay of a CUDA graph that holds several calls, divided by their number. Each has inputs and results of
its own, or, where these take much memory, those of a call so long before it that more than twice the L2 cache was moved
since. Before every sample as much is read, outside the timed region. So the inputs of every call come from device
memory. Mode ``graph`` puts enough calls into one graph for the sample to last about a millisecond: launch
gaps and event overhead drop out, as they do in an engine that replays graphs. Mode ``cold`` times one call alone.
A call that synchronises with the host cannot be captured; it is timed as it is (method ``stream``), host included.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

GRAPH, COLD = "graph", "cold"
MODES = (GRAPH, COLD)
STREAM = "stream"

TARGET_US = 1000.0
MAX_CALLS = 100
WARM_UP_ROUNDS = 1
SPIN_CYCLES = 200_000  # about 100 us: the host enqueues the replay before the device reaches it

CALLS_BYTES = 4 << 30
"""Inputs and results of an implementation's calls may take so much, and more only where the L2 cache asks for it."""

Call = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Statistics:
    """Median and spread of the samples, in the unit of the samples."""

    median: float
    p10: float
    p90: float
    samples: int


@dataclass(frozen=True)
class Footprint:
    """Bytes of one call: ``moved`` between chip and memory at the least, ``inputs`` in memory."""

    moved: int
    inputs: int

    @classmethod
    def of_sequence(cls, parts: Iterable[Footprint]) -> Footprint:
        """Of calls one after the other."""
        parts = list(parts)
        return cls(sum(part.moved for part in parts), sum(part.inputs for part in parts))


class Sampler(Protocol):
    """One implementation of one workload, ready to be timed."""

    method: str

    def sample(self) -> float:
        """Microseconds of one call."""

    def release(self) -> None:
        """Free what it holds on the device."""


class Timer(Protocol):
    """Turns calls into samplers. ``calls(i)`` is the call on the i-th copy of the inputs.

    With the ``footprint`` of a call large inputs are not copied more often than the time of a call needs.
    """

    def prepare(self, calls: Callable[[int], Call], mode: str, footprint: Footprint | None = None) -> Sampler: ...


class DeviceTimer(Timer, Protocol):
    """A timer that also knows the limits of its device."""

    l2_bytes: int

    def copy_gbps(self, rounds: int) -> Statistics: ...

    def floor_us(self, mode: str, rounds: int) -> Statistics: ...


class SampleError(RuntimeError):
    """A sampler failed while it was timed; ``name`` is its key."""

    def __init__(self, name: Any, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.name = name


def summarise(samples: Sequence[float]) -> Statistics:
    """Median, 10th and 90th percentile, interpolated between neighbouring samples."""
    ordered = sorted(samples)
    return Statistics(_quantile(ordered, 0.5), _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered))


def abba(names: Sequence[Key], rounds: int) -> Iterator[Key]:
    """Every name once in each round, every second round backwards: a drift of the clock hits all of them alike."""
    for number in range(rounds):
        yield from names if number % 2 == 0 else reversed(names)


def measure(samplers: Mapping[Key, Sampler], rounds: int) -> dict[Key, Statistics]:
    """Time the implementations of one workload against each other.

    Raises:
        SampleError: one of them failed.
    """
    samples: dict[Key, list[float]] = {name: [] for name in samplers}
    for number, name in enumerate(abba(list(samplers), WARM_UP_ROUNDS + rounds)):
        try:
            sample = samplers[name].sample()
        except Exception as error:
            raise SampleError(name, error) from error
        if number >= WARM_UP_ROUNDS * len(samplers):
            samples[name].append(sample)
    return {name: summarise(values) for name, values in samples.items()}


def calls_per_sample(single_us: float, mode: str) -> int:
    """How many calls one sample holds, given the time of one."""
    if mode == COLD:
        return 1
    return max(1, min(MAX_CALLS, math.ceil(TARGET_US / max(single_us, 1e-3))))


def sets_of(count: int, footprint: Footprint | None, results: int, l2_bytes: int) -> int:
    """How many sets of inputs and results ``count`` calls take turns with; ``results``: bytes of one call's."""
    if footprint is None:
        return count
    apart = math.ceil(2 * l2_bytes / max(1, footprint.moved))
    affordable = CALLS_BYTES // max(1, footprint.inputs + results)
    return max(1, min(count, max(apart, affordable)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class HostTimer:
    """Times calls with the clock of the host: for rehearsals on a CPU, never for a record."""

    def prepare(self, calls: Callable[[int], Call], mode: str, footprint: Footprint | None = None) -> Sampler:
        first = calls(0)
        first()
        return _HostSampler(first)


class _HostSampler:
    method = STREAM

    def __init__(self, call: Call) -> None:
        self._call = call

    def sample(self) -> float:
        start = time.perf_counter()
        self._call()
        return (time.perf_counter() - start) * 1e6

    def release(self) -> None:
        pass


class CudaTimer:
    """Times calls on one CUDA device, on a stream of its own."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)
        self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        # Read, not written: dirty lines would be written back during the timed calls.
        self._sweep = torch.zeros(5 * self.l2_bytes // 8, dtype=torch.float32, device=self.device)
        self._swept = torch.zeros((), dtype=torch.float32, device=self.device)

    def prepare(self, calls: Callable[[int], Call], mode: str, footprint: Footprint | None = None) -> Sampler:
        first = calls(0)
        torch.cuda.synchronize(self.device)  # the inputs were made on another stream
        with torch.cuda.stream(self.stream):
            first()  # compiles, loads, allocates
            before = torch.cuda.memory_allocated(self.device)
            results = first()
            held = torch.cuda.memory_allocated(self.device) - before
            del results
        self.stream.synchronize()
        if not self._captures(first):
            return self._stream_sampler(calls, first, mode, footprint, held)
        try:
            alone = self._capture([first])
        except RuntimeError:
            torch.cuda.synchronize(self.device)  # raises if the failed capture cost us the device
            return self._stream_sampler(calls, first, mode, footprint, held)
        alone.sample()
        count = calls_per_sample(min(alone.sample() for _ in range(3)), mode)
        if count == 1:
            return alone
        alone.release()
        sets = sets_of(count, footprint, held, self.l2_bytes)
        return self._capture(self._calls(calls, first, count, sets), sets)

    def copy_gbps(self, rounds: int) -> Statistics:
        """Bandwidth of a large device-to-device copy, bytes read plus bytes written, in GB/s."""
        source = torch.randint(0, 2**31, (2**27,), dtype=torch.int64, device=self.device)
        target = torch.empty_like(source)
        # On the stream: a copy node of a graph was seen to run at two thirds of the speed.
        for _ in range(20):  # brings the clocks up as well
            self.time(lambda: target.copy_(source))
        moved = 2 * source.numel() * source.element_size()
        return summarise([moved / (self.time(lambda: target.copy_(source)) * 1e3) for _ in range(2 * rounds)])

    def floor_us(self, mode: str, rounds: int) -> Statistics:
        """Time of a kernel that does nothing."""
        sampler = self.prepare(lambda _: lambda: torch.cuda._sleep(0), mode)
        result = measure({"floor": sampler}, 2 * rounds)["floor"]
        sampler.release()
        return result

    def clear_l2(self) -> None:
        """Replace the contents of the L2 cache by clean lines of another buffer."""
        torch.sum(self._sweep, dim=0, out=self._swept)

    def _captures(self, call: Call) -> bool:
        """Whether the call leaves the host out of it, found without starting a capture that would have to fail."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it calls itself a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self.stream):
                call()
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            self.stream.synchronize()
        return True

    def _capture(self, calls: Sequence[Call], sets: int = 1) -> _GraphSampler:
        """One graph of the calls; the results of so many calls in a row have memory of their own."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with _no_garbage_collection(), torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results: collections.deque[Any] = collections.deque(maxlen=sets)
                for call in calls:
                    results.append(call())
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        sampler = _GraphSampler(self, graph, list(calls), results)
        sampler.sample()  # uploads the graph
        return sampler

    def _stream_sampler(
        self, calls: Callable[[int], Call], first: Call, mode: str, footprint: Footprint | None, held: int
    ) -> _StreamSampler:
        alone = _StreamSampler(self, [first])
        alone.sample()
        count = calls_per_sample(min(alone.sample() for _ in range(3)), mode)
        sets = sets_of(count, footprint, held, self.l2_bytes)
        sampler = _StreamSampler(self, self._calls(calls, first, count, sets))
        torch.cuda.synchronize(self.device)
        return sampler

    def _calls(self, calls: Callable[[int], Call], first: Call, count: int, sets: int) -> list[Call]:
        """``count`` calls that take turns with ``sets`` sets of inputs; fewer if these would fill the device."""
        made = [first]
        for index in range(1, sets):
            if index % 8 == 0:
                free, total = torch.cuda.mem_get_info(self.device)
                if free < total // 8:
                    return made
            made.append(calls(index))
        return [made[index % sets] for index in range(count)]

    def time(self, work: Callable[[], Any]) -> float:
        """Microseconds that ``work`` keeps the stream busy, starting from a cold L2."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            self.clear_l2()
            torch.cuda._sleep(SPIN_CYCLES)
            start.record()
            work()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Whatever the collector would free on the device could end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _GraphSampler:
    method = GRAPH

    def __init__(self, timer: CudaTimer, graph: torch.cuda.CUDAGraph, calls: list[Call], results: Any) -> None:
        self._timer, self._graph = timer, graph
        self._held: Any = (calls, results)  # the graph reads and writes their memory
        self._count = len(calls)

    def sample(self) -> float:
        return self._timer.time(self._graph.replay) / self._count

    def release(self) -> None:
        self._timer.stream.synchronize()
        self._graph.reset()
        self._held = None


class _StreamSampler:
    method = STREAM

    def __init__(self, timer: CudaTimer, calls: list[Call]) -> None:
        self._timer, self._calls = timer, calls

    def sample(self) -> float:
        return self._timer.time(lambda: [call() for call in self._calls]) / len(self._calls)

    def release(self) -> None:
        self._calls = []
