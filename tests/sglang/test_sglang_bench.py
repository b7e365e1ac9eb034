"""The end-to-end benchmark's SGLang on a CPU: with the flag, and every replaced call compared with SGLang's own."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("sglang.srt")

import torch

from tk_serving.demo import checkpoint
from tk_serving.demo.engines import sglang as engine

SCRIPT = """
    import json, sys, time, torch

    class Event:  # a clock in place of the device's
        def __init__(self, enable_timing): ...
        def record(self): self.at = time.perf_counter()
        def elapsed_time(self, later): return (later.at - self.at) * 1e3

    if not torch.cuda.is_available():
        torch.cuda.Event, torch.cuda.synchronize = Event, lambda: None

    from tk_serving import dispatch
    from tk_serving.bench.e2e.sglang import SGLang

    if __name__ == "__main__":
        engine = SGLang(json.loads(sys.argv[1]))
        texts = {"sequences": 2, "prompt": 8, "tokens": 3}
        told = {
            "outputs": engine.outputs(**texts),
            "prefill": engine.prefill(16, 1),
            "decode": engine.decode(2, 3, 1),
            "sites": engine.sites(),
            "counters": dispatch.counters(),
        }
        told["same"] = engine.outputs(**texts) == told["outputs"]
        print("RESULT " + json.dumps(told), flush=True)
"""


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself runs")
def test_the_benchmark_runs_the_engine_and_names_no_site_that_deviates(tmp_path):
    settings = {
        "folder": str(checkpoint.write("v3", tmp_path / "v3")),
        "backend": "tilekernels",
        "sizes": [1, 2],
        "prefill": 512,
        "steps": 3,
        "eager": True,
        "arguments": {
            "device": "cpu",
            "attention_backend": "torch_native",
            "mem_fraction_static": 0.3,
            "disable_overlap_schedule": True,
        },
    }
    (tmp_path / "run.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **engine.environment("cpu"), "TK_SERVING_COMPARE": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    told = json.loads(line.removeprefix("RESULT "))
    tokens, logprobs = told["outputs"]["tokens"], told["outputs"]["logprobs"]
    assert told["same"]
    assert [len(text) for text in tokens] == [3, 3]
    for text, positions in zip(tokens, logprobs, strict=True):
        assert [int(max(at, key=at.get)) for at in positions] == text
    assert told["prefill"]["ms"] > 0
    assert 0 < told["decode"]["ms"] < told["decode"]["wall_ms"] * 4  # one step of all
    assert {row["site"] for row in told["sites"]["rows"]} == {"routing", "routed-experts", "swiglu"}
    assert told["sites"]["first"] is None, told["sites"]["rows"]
    assert {row["operator"] for row in told["counters"]} >= set(engine.EXPECTED["cpu"])
