"""A record made by hand, and a timer whose times are known."""

import pytest

from tk_serving.bench.record import ChainRow, PeerResult, Record, Row
from tk_serving.bench.timing import Statistics


class FakeSampler:
    method = "graph"

    def __init__(self, times, call):
        self.times, self.call, self.taken, self.released = list(times), call, 0, False

    def sample(self):
        self.call()
        self.taken += 1
        return self.times[(self.taken - 1) % len(self.times)]

    def release(self):
        self.released = True


class FakeTimer:
    """The n-th prepared implementation takes the n-th of the given times."""

    l2_bytes = 2**20

    def copy_gbps(self, rounds):
        return Statistics(4000.0, 3900.0, 4100.0, rounds)

    def floor_us(self, mode, rounds):
        return Statistics(1.0, 0.9, 1.1, rounds)

    def __init__(self, *times):
        self.times, self.samplers, self.modes = list(times), [], []

    def prepare(self, calls, mode, footprint=None):
        times = self.times[len(self.samplers) % len(self.times)]
        self.samplers.append(FakeSampler(times if isinstance(times, (list, tuple)) else [times], calls(0)))
        self.modes.append(mode)
        calls(1)()  # every call has inputs of its own
        return self.samplers[-1]


def make_row(operator="moe.topk_gate", model="v3", tokens=64, us=4.0, factors=(("vllm", 1.5),), **changes):
    peers = [PeerResult(name, us * f, us * f * 0.95, us * f * 1.1, "graph", "equal") for name, f in factors]
    row = Row(
        *(operator, f"{model}-decode", tokens, "graph"),
        us=us,
        p10=us and us * 0.95,
        p90=us and us * 1.1,
        bytes=int(4e6 * tokens),
        model=model,
        params={"experts": 256},
        method="graph",
        agreement="equal",
        peers=peers,
    )
    for name, value in changes.items():
        setattr(row, name, value)
    row.conclude(4000.0)
    return row


def make_record(rows=None, **changes):
    if rows is None:
        rows = []
        for operator in ("moe.topk_gate", "quant.per_token_cast"):
            for model in ("v3", "v4-flash"):
                for tokens in (1, 8, 64, 512, 4096, 8192):
                    us = 2.0 + tokens * 1e-3
                    rows.append(make_row(operator, model, tokens, us, (("vllm", 1.4), ("reference", 9.0))))
    fields = {
        "device": "NVIDIA H200",
        "driver": "580.159.04",
        "versions": {"torch": "2.11.0", "tilelang": "0.1.12"},
        "revision": "0123456789abcdef",
        "date": "2026-11-30T10:00:00+00:00",
        "copy_gbps": 4000.0,
        "floor_us": 1.1,
        "floors": {"graph": 1.1},
        "rows": rows,
        "chains": [ChainRow("v3", 64, 50.0, 49.0, 52.0, "vllm", 70.0, 1.4, True, left_out={"router": "no kernel"})],
    }
    return Record(**{**fields, **changes})


@pytest.fixture
def fake_timer():
    return FakeTimer


@pytest.fixture
def row():
    return make_row


@pytest.fixture
def record():
    return make_record
