"""How long a call takes on the device.

A sample is one replay of a CUDA graph that holds several calls, each with inputs of its own, divided by their number.
Before every sample more than twice the L2 cache is read, outside the timed region, so the inputs of every call come
from device memory. Mode ``graph`` puts enough calls into one graph for the sample to last about a millisecond: launch
gaps and event overhead drop out, as they do in an engine that replays graphs. Mode ``cold`` times one call alone.
A call that synchronises with the host cannot be captured; it is timed as it is (method ``stream``), host included.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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

Call = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Statistics:
    """Median and spread of the samples, in the unit of the samples."""

    median: float
    p10: float
    p90: float
    samples: int


class Sampler(Protocol):
    """One implementation of one workload, ready to be timed."""

    method: str

    def sample(self) -> float:
        """Microseconds of one call."""

    def release(self) -> None:
        """Free what it holds on the device."""


class Timer(Protocol):
    """Turns calls into samplers. ``calls(i)`` is the call on the i-th copy of the inputs."""

    def prepare(self, calls: Callable[[int], Call], mode: str) -> Sampler: ...


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


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class HostTimer:
    """Times calls with the clock of the host: for rehearsals on a CPU, never for a record."""

    def prepare(self, calls: Callable[[int], Call], mode: str) -> Sampler:
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

    def prepare(self, calls: Callable[[int], Call], mode: str) -> Sampler:
        first = calls(0)
        torch.cuda.synchronize(self.device)  # the inputs were made on another stream
        with torch.cuda.stream(self.stream):
            first()  # compiles, loads, allocates
        self.stream.synchronize()
        if not self._captures(first):
            return self._stream_sampler(calls, first, mode)
        try:
            alone = self._capture([first])
        except RuntimeError:
            torch.cuda.synchronize(self.device)  # raises if the failed capture cost us the device
            return self._stream_sampler(calls, first, mode)
        alone.sample()
        count = calls_per_sample(min(alone.sample() for _ in range(3)), mode)
        if count == 1:
            return alone
        alone.release()
        return self._capture([first, *self._more(calls, count)])

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

    def _capture(self, calls: Sequence[Call]) -> _GraphSampler:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with _no_garbage_collection(), torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = [call() for call in calls]  # all kept: no two calls write to the same memory
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        sampler = _GraphSampler(self, graph, list(calls), results)
        sampler.sample()  # uploads the graph
        return sampler

    def _stream_sampler(self, calls: Callable[[int], Call], first: Call, mode: str) -> _StreamSampler:
        alone = _StreamSampler(self, [first])
        alone.sample()
        count = calls_per_sample(min(alone.sample() for _ in range(3)), mode)
        sampler = _StreamSampler(self, [first, *self._more(calls, count)])
        torch.cuda.synchronize(self.device)
        return sampler

    def _more(self, calls: Callable[[int], Call], count: int) -> Iterator[Call]:
        """The second to the last call, fewer if their inputs would fill the device."""
        for index in range(1, count):
            if index % 8 == 0:
                free, total = torch.cuda.mem_get_info(self.device)
                if free < total // 8:
                    return
            yield calls(index)

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

    def __init__(self, timer: CudaTimer, graph: torch.cuda.CUDAGraph, calls: list[Call], results: list[Any]) -> None:
        self._timer, self._graph = timer, graph
        self._held = (calls, results)  # the graph reads and writes their memory
        self._count = len(calls)

    def sample(self) -> float:
        return self._timer.time(self._graph.replay) / self._count

    def release(self) -> None:
        self._timer.stream.synchronize()
        self._graph.reset()
        self._held = ([], [])


class _StreamSampler:
    method = STREAM

    def __init__(self, timer: CudaTimer, calls: list[Call]) -> None:
        self._timer, self._calls = timer, calls

    def sample(self) -> float:
        return self._timer.time(lambda: [call() for call in self._calls]) / len(self._calls)

    def release(self) -> None:
        self._calls = []
