"""The API log and NVTX ranges: what they write, and that they cost nothing when they are off."""

import os
import subprocess
import sys

import pytest
import torch

from tk_serving import dispatch, moe, tracing
from tk_serving.config import settings


@pytest.fixture(autouse=True)
def _settings():
    saved = dict(settings)
    yield
    for name, value in saved.items():
        setattr(settings, name, value)


def test_nothing_is_wrapped_when_both_are_off():
    assert dispatch.run is dispatch._run
    settings.log, settings.nvtx = "", False
    assert tracing.traced(dispatch._run) is dispatch._run


def test_the_line_is_written_before_the_call_runs():
    """A process that dies in the call has named it."""
    program = (
        "import os, torch; from tk_serving import moe, operator;"
        "op = operator.find('topk_gate'); object.__setattr__(op, 'reference', lambda *a: os._exit(9));"
        "moe.topk_gate(torch.zeros(3, 8), 2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TK_SERVING_LOG": "api"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 9
    line = done.stderr.splitlines()[-1]
    assert line.startswith("tk-serving api: ")
    assert "moe.topk_gate cpu: scores=float32[3, 8], num_topk=2 -> moe.topk_gate(" in line


def test_ranges_open_and_close_around_a_call(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda message: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: events.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end"))
    settings.nvtx = True
    monkeypatch.setattr(dispatch, "run", tracing.traced(dispatch._run))
    moe.topk_gate(torch.randn(3, 8), 2)
    assert events == ["tk_serving.moe.topk_gate", "end"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="describes a CPU build of torch")
def test_without_nvtx_a_warning_says_so(caplog):
    settings.nvtx = True
    assert tracing.traced(dispatch._run) is dispatch._run
    assert "TK_SERVING_NVTX=1 has no effect" in caplog.text


def test_arguments_are_described_by_their_metadata():
    data, sf = torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(3, 2).t()
    assert tracing.describe((data, sf)) == "(bfloat16[2, 4], float32[2, 3] strides [1, 2])"
    assert tracing.describe([1, None, "e4m3"]) == "(1, None, 'e4m3')"
