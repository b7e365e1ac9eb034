"""The demo's verdicts and its handling of servers, without an engine; the engine tests follow at the end."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from tk_serving import demo
from tk_serving.demo import compare, engines
from tk_serving.demo.server import Server, ServerError


def completion(text="ab", tokens=("token_id:1", "token_id:2"), shift=0.0):
    rows = [{"token_id:1": -1.0 + shift, "token_id:2": -2.0}, {"token_id:1": -1.5, "token_id:2": -2.5 + shift}]
    return compare.Completion(text, list(tokens), [{"token_id:7": -3.0 + shift}], rows)


def test_largest_difference_looks_at_prompt_and_answer():
    assert compare.largest_difference([completion()], [completion()]) == 0
    assert compare.largest_difference([completion()], [completion(shift=0.25)]) == pytest.approx(0.25)


def test_positions_after_the_first_other_token_do_not_count():
    mine, other = completion(), completion(tokens=("token_id:2", "token_id:2"))
    other.positions[1] = {"token_id:1": -9.0}
    other.positions[0] = {"token_id:1": -1.125, "token_id:2": -2.0}
    assert compare.largest_difference([mine], [other]) == 0.125


def test_positions_without_a_shared_token_are_infinitely_different():
    other = completion()
    other.positions[0] = {"token_id:5": -1.0}
    assert compare.largest_difference([completion()], [other]) == float("inf")


def test_calls_are_read_from_the_metrics_page():
    page = (
        "# HELP tk_serving_calls_total Calls\n# TYPE tk_serving_calls_total counter\n"
        'tk_serving_calls_total{implementation="kernel",operator="topk_gate",reason=""} 12.0\n'
        "# HELP other Other\n# TYPE other gauge\nother 3.0\n"
    )
    assert compare.calls(page) == [{"implementation": "kernel", "operator": "topk_gate", "reason": "", "calls": 12}]


EXPECTED = engines.find("vllm").EXPECTED["cpu"]
ROWS = [{"operator": o, "implementation": "reference", "reason": "", "calls": 3} for o in EXPECTED]


@pytest.mark.parametrize(
    ("difference", "calls", "none", "why"),
    [
        (0.021, ROWS, [], r"the largest logprob difference is 0\.0210, above 0\.02"),
        (float("nan"), ROWS, [], "the largest logprob difference is nan"),
        (0.0, ROWS[1:], [], "no calls of top2_sum_gate"),
        (0.0, [{**ROWS[0], "implementation": "engine"}, *ROWS[1:]], [], "no calls of top2_sum_gate"),
        (0.0, ROWS, ROWS[:1], "the server without the flag counted calls of tk-serving"),
    ],
)
def test_verdicts(tmp_path, difference, calls, none, why):
    run = demo.Demo("vllm", "v3", 4, 0, False, tmp_path, Console(), device="cpu")
    run._judge(0.019, ROWS, [])
    with pytest.raises(demo.DemoError, match=why):
        run._judge(difference, calls, none)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine": "other"}, "engine 'other': expected one of vllm, sglang"),
        ({"model": "v9"}, "model 'v9': expected one of v3"),
    ],
)
def test_wrong_options_fail_the_demo(capsys, options, why):
    assert demo.run(**options) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"demo: FAILED {why}"


# A stand-in for vLLM's API server: answers /health, and has a child process that ignores polite signals.
SERVER = """
    import http.server, os, signal, subprocess, sys

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    child = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; time.sleep(600)"
    if "--broken" in sys.argv:
        print("cannot start")
        sys.exit(3)
    print("child", subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:2]):
        (folder / "__init__.py").write_text("")
    (package / "api_server.py").write_text(textwrap.dedent(SERVER))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "log"


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_no_process_is_left_behind(stand_in, monkeypatch):
    monkeypatch.setattr("tk_serving.demo.server._PATIENCE_S", (0.5, 0.5, 10.0))
    lines = []
    with Server([], stand_in, watch=lines.append) as server:
        server.get("/health")
        child = int(re.search(r"child (\d+)", stand_in.read_text())[1])
        assert alive(child)
    assert not alive(child)
    assert server.last_lines[0] == f"child {child}"


def test_a_server_that_ends_early_is_an_error(stand_in):
    with pytest.raises(ServerError, match="ended with code 3 before it was ready"), Server(["--broken"], stand_in):
        pass
    assert stand_in.read_text() == "cannot start\n"


def tk_serving_demo(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "tk_serving.demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


def test_an_interrupted_demo_ends_its_server(stand_in):
    running = tk_serving_demo("--keep", PYTHONPATH=os.environ["PYTHONPATH"])
    logs: list[Path] = []
    deadline = time.monotonic() + 120
    while not logs and time.monotonic() < deadline:
        time.sleep(0.2)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        logs = [Path(os.readlink(f"/proc/{pid}/fd/1")) for pid in children if Path(f"/proc/{pid}/fd/1").exists()]
    while "child" not in logs[0].read_text():
        time.sleep(0.2)
    child = int(re.search(r"child (\d+)", logs[0].read_text())[1])
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert output.splitlines()[-1] == "demo: FAILED interrupted"
    assert running.returncode == 1
    assert not alive(child)


# -- with the real engine ------------------------------------------------------------------------------------------

WRONG = """
    # Imported by every Python process that has this folder on its path: one operator computes something else.
    from tk_serving import operator

    found = operator.find("swiglu_forward")
    right = found.reference
    object.__setattr__(found, "reference", lambda *args, **kwargs: right(*args, **kwargs) * 1.25)
"""


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("option", "implementation"), [([], "reference"), (["--simulate"], "simulator")])
def test_the_demo_succeeds(option, implementation):
    pytest.importorskip("vllm")
    output, _ = (running := tk_serving_demo(*option)).communicate(timeout=800)
    assert running.returncode == 0, output
    assert output.splitlines()[-1] == "demo: OK"
    assert float(re.search(r"Largest logprob difference: ([\d.]+)", output)[1]) < demo.LIMIT
    for name in EXPECTED:
        assert re.search(rf"{name}\s+│\s+[1-9]\d*\s+│ {implementation}", output), output


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_demo_fails_with_a_wrong_operator(tmp_path):
    pytest.importorskip("vllm")
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(WRONG))
    running = tk_serving_demo(PYTHONPATH=str(tmp_path))
    output, _ = running.communicate(timeout=800)
    assert running.returncode == 1
    assert re.fullmatch(r"demo: FAILED the largest logprob difference is .*, above 0\.02", output.splitlines()[-1])
    assert "end of tilekernels.log" in output
