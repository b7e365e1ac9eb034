"""A server under mixed load for minutes: no error, no growth, and counters that add up.

``python -m tk_serving.bench.e2e.soak --model v4-flash --seconds 600 --json RECORD`` starts ``vllm serve`` with random
weights and vLLM's JIT monitor on ``error``, so that a compilation after the warm-up ends the server, and keeps clients
going: prompts of 1 to 6000 tokens, many with a beginning that others have had (prefix caching), longer ones than a step
takes (chunked prefill), bursts that fill the batch, clients that hang up. vLLM's counters of requests and those of our
operators are compared with what was sent.

Memory is sampled: of the device what the workers' tensors take and what torch has reserved for them, of the host what
all processes of the server have written. No growth means, at the ten points where the server is let run empty, from the
first third of the load on:

- A leak takes more again and again: no series may set a new maximum, by more than 1 MiB a minute, in more than half of
  the stretches between two points.
- What tensors take between requests may grow by 64 MiB in all, for something that is made at its first use.
- What is reserved may grow by 4 %, what the host has by 2 %. torch's allocator keeps segments and splits them, and
  takes one more when a mix of sizes has not occurred before; that may be late and says nothing of a leak.

With ``--warm-up 30`` the monitor only warns for that long. Then what vLLM's warm-up leaves out of its own kernels is
compiled (:mod:`tk_serving.bench.e2e.jit_monitor`), and it is on ``error`` from there on.

SIGTERM ends the load early. If the process is stopped for a while (SIGSTOP), that time does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tk_serving.bench.e2e import models
from tk_serving.bench.record import versions
from tk_serving.demo.compare import samples_of
from tk_serving.environment import revision

RESTS = 10  # points at which the server is let run empty
ALLOWED_RATE = 1.0  # MiB a minute
ALLOWED_MIB = 64.0  # of what tensors take
ALLOWED_PERCENT = {"device_mib": 4.0, "host_mib": 2.0}
"""Of what is reserved (three segments of V4-Flash's largest steps) and of what the host has."""
ALLOWED_SHARE, FEW_CALLS = 0.1, 100  # by how much operators' calls may grow apart, of those that are not rare


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, load, judge; 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tk_serving.bench.e2e.soak", description=__doc__)
    parser.add_argument("--model", default="v4-flash", choices=sorted(models.MODELS))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--warm-up", type=float, default=0, help="seconds of load before, in which vLLM's JIT monitor only warns"
    )
    parser.add_argument("--longest", type=int, default=6000, help="tokens of the longest prompt")
    parser.add_argument("--step-tokens", type=int, default=2048, help="of a step: longer prompts are read in parts")
    parser.add_argument("--sequences", type=int, default=64, help="of a full batch")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--backend", default="tilekernels", choices=("tilekernels", "auto"))
    parser.add_argument("--start-limit", type=float, default=400, help="seconds within which the server is ready")
    parser.add_argument("--arguments", default="", help="further arguments of `vllm serve`")
    parser.add_argument("--revision", default="", help="Git revision for the record where there is no checkout")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the model and the server's log")
    parser.add_argument("--json", type=Path, default=None, help="the record")
    parser.add_argument("--folder", type=Path, default=None, help="a model of one's own, instead of --model")
    options = parser.parse_args(arguments)
    record = run(options)
    print(json.dumps({k: v for k, v in record.items() if k not in ("samples", "versions")}, indent=1), flush=True)
    return 0 if record["passes"] else 1


def run(options: Any) -> dict[str, Any]:
    """The record, which is also written to ``options.json`` as it grows."""
    logs = options.logs or Path(tempfile.mkdtemp(prefix="tk-serving-soak-"))
    folder = options.folder or logs / f"{options.model}-{options.layers}"
    folder.mkdir(parents=True, exist_ok=True)
    if not options.folder:
        models.write(options.model, options.layers, folder, tokenizer=True)
        (folder / "generation_config.json").write_text("{}")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *_flags(options)]
    environment = {
        **os.environ,
        "TK_SERVING_STATE_DIR": str(logs / "state"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # workers are asked for their memory
    }
    (logs / "state").mkdir(exist_ok=True)
    record: dict[str, Any] = {
        "engine": "vllm",
        "model": options.model,
        "layers": options.layers,
        "command": shlex.join(command[2:]).replace(str(folder), folder.name),
        "device": _device(),
        "versions": versions(),
        "revision": options.revision or revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    with _server(command, environment, logs / "server.log") as server:
        try:
            asyncio.run(_soak(options, record, server, folder, logs / "server.log"))
        except Exception as error:
            record["failed"] = f"{type(error).__name__}: {error}"[:2000]
        log = (logs / "server.log").read_text(errors="replace")  # before it is told to end
    before = record.get("warm_up", {}).get("log_characters", 0)
    record["errors_in_log"], record["compiled_under_load"] = _errors(log[before:]), compiled(log[before:])
    record["passes"] = judge(record)
    _write(options, record)
    return record


def _errors(log: str) -> list[str]:
    bad = re.compile(r"\bERROR\b|\bWARNING\b.*JIT")
    return [line[:300] for line in log.splitlines() if bad.search(line)][:20]


def compiled(log: str) -> list[str]:
    """Kernels that vLLM's JIT monitor has named in the log, in order."""
    named = re.findall(r"(\w+) (?:kernel )?JIT compilation during inference: ([\w.]*\w)", log)
    return list(dict.fromkeys(f"{name} ({compiler})" for compiler, name in named))


def _flags(options: Any) -> list[str]:
    own = [
        *("--kernel-backend", options.backend, "--port", str(options.port), "--host", "127.0.0.1"),
        *("--max-num-batched-tokens", str(options.step_tokens), "--max-num-seqs", str(options.sequences)),
        *("--max-model-len", str(options.longest + 128), "--enable-prefix-caching"),
    ]
    if not options.folder:
        own += [
            *("--load-format", "tk_random", "--worker-extension-cls", "tk_serving.bench.e2e.worker.Extension"),
            *("--dtype", "bfloat16", "--tokenizer-mode", "hf"),
            *(
                "--jit-monitor-mode",
                "warn" if options.warm_up else "error",
                "--kv-cache-memory-bytes",
                str(1 << 30),
                "--gpu-memory-utilization",
                "0.2",
            ),
        ]
    return own + shlex.split(options.arguments)


@contextlib.contextmanager
def _server(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


async def _soak(options: Any, record: dict[str, Any], server: Any, folder: Path, log: Path) -> None:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_read=900)
    started = time.monotonic()
    base = f"http://127.0.0.1:{options.port}"
    # A connection for each request: the server closes those that were idle while all processes were stopped.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(base, timeout=timeout, connector=connector) as http:
        while not await _healthy(http):
            if server.poll() is not None or time.monotonic() - started > options.start_limit:
                raise RuntimeError(f"the server is not ready; its log ends:\n{_tail(log)}")
            await asyncio.sleep(0.5)
        record["ready_s"] = round(time.monotonic() - started, 1)
        print(f"the server is ready after {record['ready_s']} s", flush=True)
        load = _Load(http, str(folder), options.longest)
        record["samples"] = samples = []
        record["errors"] = load.errors
        if options.warm_up:
            await _warm_up(options, record, http, load, log)
        clock = _Clock(options.seconds)
        with contextlib.suppress(NotImplementedError, RuntimeError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, clock.end)

        async def sample(idle: bool) -> None:
            record["counters"] = await _counters(http)
            found = {**await _memory(http, server.pid), **load.counts, "calls": by_operator(record["counters"])}
            samples.append({"s": round(clock.seconds, 1), "idle": idle, **found})
            record["sent"] = dict(load.counts)
            times = {"seconds": clock.seconds, "stopped_s": clock.stopped, "rested_s": clock.rested}
            record.update({name: round(value, 1) for name, value in times.items()})
            _write(options, record)

        await sample(idle=True)
        ticking = asyncio.create_task(clock.run())
        tasks = [asyncio.create_task(load.client(i, clock)) for i in range(options.sequences * 5 // 4)]
        rest = stretch = max(options.seconds / RESTS, 5.0)
        while not clock.ended and server.poll() is None and not load.errors:
            await asyncio.sleep(min(5.0, stretch / 2))
            if clock.seconds < rest or clock.ended:
                await sample(idle=False)
                continue
            rest += stretch
            clock.resting = True
            await asyncio.wait_for(load.rest(), 600)
            await asyncio.sleep(1)  # requests of clients that hung up
            await sample(idle=True)
            clock.resting = False
            load.go_on()
        clock.end()
        load.go_on()
        await asyncio.wait_for(asyncio.gather(*tasks, ticking), 180)
        await asyncio.sleep(2)  # the states of the processes are shared every second
        await sample(idle=True)
        record["alive"] = await _healthy(http)


async def _warm_up(options: Any, record: dict[str, Any], http: Any, load: Any, log: Path) -> None:
    """Some load, then what vLLM's warm-up leaves out, and its JIT monitor on ``error``."""
    await _ask(http, "tk_watch")
    clock = _Clock(options.warm_up)
    ticking = asyncio.create_task(clock.run())
    tasks = [asyncio.create_task(load.client(i, clock)) for i in range(options.sequences * 5 // 4)]
    await asyncio.wait_for(asyncio.gather(*tasks, ticking), 180 + options.warm_up)
    monitors = await _ask(http, "tk_monitor")
    await asyncio.sleep(1)  # lines of the log that are under way
    text = log.read_text(errors="replace")
    record["warm_up"] = {
        "seconds": round(clock.seconds, 1),
        "sent": dict(load.counts),
        "jit_monitor": monitors,
        "in_log": _errors(text),
        "log_characters": len(text),
    }
    print(json.dumps(record["warm_up"], indent=1), flush=True)


class _Clock:
    """Seconds of load: those in which this process was stopped, or the server was let run empty, are counted apart.

    Attributes:
        seconds: of load so far.
        stopped: in which the process did not run.
        rested: in which the clients held still.
        resting: they do so now.
        ended: no further request is to begin.
    """

    TICK, LATE = 0.25, 2.0

    def __init__(self, limit: float) -> None:
        self.limit, self.seconds, self.stopped, self.rested = limit, 0.0, 0.0, 0.0
        self.resting = self.ended = False

    def end(self) -> None:
        self.ended = True

    async def run(self) -> None:
        before = time.monotonic()
        while not self.ended:
            await asyncio.sleep(self.TICK)
            before, passed = time.monotonic(), time.monotonic() - before
            self.add(passed)

    def add(self, passed: float) -> None:
        """Time between two ticks."""
        if passed > self.LATE:
            self.stopped += passed
        elif self.resting:
            self.rested += passed
        else:
            self.seconds += passed
        self.ended = self.ended or self.seconds >= self.limit


class _Load:
    """Clients that ask for one text after another."""

    def __init__(self, http: Any, model: str, longest: int) -> None:
        self.http, self.model, self.longest = http, model, longest
        config = json.loads(Path(model, "config.json").read_text())
        self.vocabulary = config.get("text_config", config)["vocab_size"]
        self.counts: Counter[str] = Counter(sent=0, finished=0, hung_up=0, tokens=0)
        self.errors: list[str] = []
        self._busy, self._going = 0, asyncio.Event()
        self._going.set()
        generator = random.Random(0)
        self.beginnings = [[self._token(generator) for _ in range(longest // n)] for n in (2, 4, 9, 90)]

    async def client(self, number: int, clock: _Clock) -> None:
        generator = random.Random(number)
        while not clock.ended and not self.errors:
            self._busy += 1
            try:
                await self._one(generator)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}"[:500])
            finally:
                self._busy -= 1
            # Mostly all clients are busy, so that the batch is full; now and then only a few of them.
            await asyncio.sleep(generator.choice((0, 0, 0, 0, 0.05, 0.5)))
            await self._going.wait()

    async def rest(self) -> None:
        """No further request, until :meth:`go_on`; returns when all have ended."""
        self._going.clear()
        while self._busy:
            await asyncio.sleep(0.05)

    def go_on(self) -> None:
        self._going.set()

    def _token(self, generator: random.Random) -> int:
        return generator.randrange(2, self.vocabulary)

    async def _one(self, generator: random.Random) -> None:
        length = int(2 ** generator.uniform(0, math.log2(self.longest)))  # short ones as often as long ones
        prompt = generator.choice(self.beginnings) if generator.random() < 0.4 else []
        prompt = [*prompt, *(self._token(generator) for _ in range(length))][: self.longest]
        tokens = int(2 ** generator.uniform(0, 7))
        patience = generator.randrange(1, 24) if generator.random() < 0.15 else None
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        self.counts["sent"] += 1
        seen = 0
        async with self.http.post("/v1/completions", json={**body, "temperature": generator.choice((0, 1))}) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:300])
                seen += 1
                if patience is not None and seen >= patience:
                    self.counts["hung_up"] += 1
                    return
        self.counts["finished"] += 1
        self.counts["tokens"] += tokens


async def _healthy(http: Any) -> bool:
    with contextlib.suppress(Exception):
        async with http.get("/health") as answer:
            return answer.status == 200
    return False


async def _counters(http: Any) -> dict[str, Any]:
    async with http.get("/metrics") as answer:
        return read(await answer.text())


def read(metrics: str) -> dict[str, Any]:
    """vLLM's requests by how they ended, our operators' calls by implementation and reason, and kernels compiled while
    serving, from the text of a ``/metrics`` page."""
    requests: Counter[str] = Counter()
    for row in samples_of(metrics, "vllm:request_success_total"):
        requests[row["finished_reason"]] += row["value"]
    calls = {
        " ".join(filter(None, (row["operator"], row["implementation"], row["reason"]))): row["value"]
        for row in samples_of(metrics, "tk_serving_calls_total")
    }
    compilations = sum(row["value"] for row in samples_of(metrics, "tk_serving_jit_compilations_total"))
    return {"requests": dict(requests), "calls": calls, "compilations": compilations}


def by_operator(counters: Mapping[str, Any]) -> dict[str, int]:
    """Calls of each operator, whatever implementation ran them, kernels or the engine's own."""
    calls: Counter[str] = Counter()
    for name, count in counters["calls"].items():
        calls[name.partition(" ")[0]] += count
    return dict(calls)


def add_up(samples: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every operator was called as often for each step in the second half of the load as in the first: a model
    calls all of them in every step that passes through Python, so that their counts grow in proportion.

    Counts of a step that was under way when they were read may be missing.
    """
    calls = [sample["calls"] for sample in samples if "calls" in sample]
    if len(calls) < 3:
        return False
    first, middle, last = calls[0], calls[len(calls) // 2], calls[-1]
    grown = {
        name: (middle.get(name, 0) - first.get(name, 0), count - middle.get(name, 0)) for name, count in last.items()
    }
    grown = {name: halves for name, halves in grown.items() if max(halves) >= FEW_CALLS}
    shares = [late / early if early else math.inf for early, late in grown.values()]
    return bool(shares) and max(shares) <= min(shares) * (1 + ALLOWED_SHARE)


async def _memory(http: Any, pid: int) -> dict[str, float]:
    """MiB of the device that the workers' torch has reserved and what their tensors take, or what is used of the whole
    device if they cannot be asked; and of the host, of all processes of the server."""
    import psutil

    host = 0
    with contextlib.suppress(psutil.Error):
        own = psutil.Process(pid)
        host = sum(_written(process) for process in [own, *own.children(recursive=True)])
    try:
        workers = await _ask(http, "tk_memory")
        found = {name: round(sum(worker[name] for worker in workers), 2) for name in ("reserved_mib", "allocated_mib")}
        device = {"device_mib": found["reserved_mib"], "allocated_mib": found["allocated_mib"]}
    except Exception:  # a server without our worker extension
        device = {"device_mib": _device_mib()}
    return {**device, "host_mib": round(host / 2**20, 1)}


def _written(process: Any) -> int:
    """Bytes of a process that are no file's, its share of what it has in common with others: shares of files, libraries
    above all, grow when some other process ends."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        found = re.findall(r"^Pss_(?:Anon|Shmem): *(\d+) kB", text, re.MULTILINE)
    except OSError:
        return 0  # it has ended
    return sum(map(int, found)) * 1024 if found else int(process.memory_full_info().pss)


async def _ask(http: Any, method: str) -> list[Any]:
    """The answers of all workers."""
    async with http.post("/collective_rpc", json={"method": method}) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{method}: {answer.status}: {(await answer.text())[:300]}")
        return list((await answer.json())["results"])


def _device_mib() -> float:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with contextlib.suppress(Exception):
        return float(subprocess.run([*query, "-i", which or "0"], capture_output=True, text=True, timeout=20).stdout)
    return 0.0


def _device() -> str:
    with contextlib.suppress(Exception):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    return "cpu"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def judge(record: dict[str, Any]) -> bool:
    """Put what was found into words: ``checks`` of the record, each True or False."""
    samples = record.get("samples", [])
    sent, counters = record.get("sent", {}), record.get("counters", {"requests": {}, "calls": {}})
    record["memory"] = memory = {name: growth(samples, name) for name in ("allocated_mib", "device_mib", "host_mib")}
    record["memory_rule"] = (
        "At samples with `idle`, from the first third of the load on: `grown` at most `may` MiB, and `rose` at most "
        f"`may_rise`: in how many stretches a series set a new maximum by more than {ALLOWED_RATE:.0f} MiB a minute."
    )
    ended = sum(counters["requests"].values())
    record["checks"] = {
        "alive": bool(record.get("alive")) and not record.get("failed"),
        "no_error": not record.get("errors") and not record["errors_in_log"],
        "all_ended": bool(sent) and sent["sent"] == sent["finished"] + sent["hung_up"],
        "requests_add_up": bool(sent) and sent["finished"] <= ended <= sent["sent"],
        "calls_add_up": add_up(samples),
        "no_call_without_kernel": not any("not built" in name for name in counters["calls"]),
        "no_compilation": not counters.get("compilations"),
        "device_steady": steady(memory["device_mib"])
        and (not memory["allocated_mib"] or steady(memory["allocated_mib"])),
        "host_steady": steady(memory["host_mib"]),
    }
    if warmed := record.get("warm_up"):
        record["checks"]["jit_monitor"] = bool(warmed["jit_monitor"]) and all(
            one["active"] and one["mode"] == "error" for one in warmed["jit_monitor"]
        )
    return all(record["checks"].values())


def growth(samples: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """How a series grew from the first third of the load on, at the points where the server was idle: ``grown`` from
    the first of them to the last, by how much it ``may``, and in how many ``stretches`` it ``rose`` to a new maximum by
    more than the allowed rate. Empty if it was not sampled, or at fewer than four points."""
    last = samples[-1]["s"] if samples else 0.0
    points = [(s["s"], s[name]) for s in samples if s.get("idle") and s["s"] >= last / 3 and name in s]
    if len(points) < 4:
        return {}
    rose, (_, first), highest = 0, points[0], points[0][1]
    for (before, _), (s, value) in itertools.pairwise(points):
        rose += value - highest > ALLOWED_RATE * (s - before) / 60
        highest = max(highest, value)
    may = ALLOWED_MIB if name == "allocated_mib" else first * ALLOWED_PERCENT[name] / 100
    grown = {"from": first, "grown": round(points[-1][1] - first, 2), "may": round(may, 1)}
    return {**grown, "stretches": len(points) - 1, "rose": rose, "may_rise": (len(points) - 1) // 2}


def steady(found: Mapping[str, Any]) -> bool:
    """Whether a series neither leaks nor grows by more than it may; ``found`` by :func:`growth`."""
    return bool(found) and found["grown"] <= found["may"] and found["rose"] <= found["may_rise"]


def _write(options: Any, record: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
