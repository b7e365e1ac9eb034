"""The real engine: the demo, the other two ways to start it, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("sglang.srt")

import torch

from tk_serving import demo
from tk_serving.demo import checkpoint
from tk_serving.demo.engines import sglang as engine
from tk_serving.demo.server import Server

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    return checkpoint.write("v3", tmp_path_factory.mktemp("v3"))


@pytest.fixture(scope="module")
def v2(v3, tmp_path_factory):
    """A tiny V2 without weights: softmax scores, groups ranked by their best expert."""
    folder = tmp_path_factory.mktemp("v2") / "model"
    shutil.copytree(v3, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "config.json").read_text())
    settings |= {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def environment(tmp_path):
    return {**engine.environment(DEVICE), "TK_SERVING_STATE_DIR": str(tmp_path / "state")}


def test_the_demo_succeeds():
    """``launch_server`` with the flag and without: the same texts and nearly the same log-probabilities."""
    done = subprocess.run(
        [sys.executable, "-m", "tk_serving.demo", "--engine", "sglang"], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "demo: OK"
    assert 0 < float(re.search(r"Largest logprob difference: ([\d.]+)", done.stdout)[1]) < demo.LIMIT
    for name in engine.EXPECTED[DEVICE]:
        assert re.search(rf"{name}\s+│\s+[1-9]\d*\s+│", done.stdout), done.stdout


COMMAND = """
    # What the command "sglang" runs.
    from sglang.cli.main import main

    if __name__ == "__main__":
        main()
"""


def test_sglang_serve(v2, tmp_path):
    """The other command, and a model of another class."""
    arguments = ["serve", *engine.arguments(v2, "v2", DEVICE, False)]
    arguments += ["--load-format", "dummy", "--kernel-backend", "tilekernels"]
    log = tmp_path / "log"
    (tmp_path / "sglang_command.py").write_text(textwrap.dedent(COMMAND))
    variables = environment(tmp_path) | {"PYTHONPATH": str(tmp_path)}
    with Server(arguments, log, variables, module="sglang_command") as server:
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = server.post("/generate", {"text": "tokens find experts", "sampling_params": sampling})
        assert len(answer["output_ids"]) == 4
        told = json.loads(server.get("/server_info"))
        page = server.get("/metrics")
    assert told["kernel_backend"] == "tilekernels"
    state = told["internal_states"][0]["tk_serving"]
    status = {row["site"]: row["status"] for row in state["sites"]}
    assert status["routing-grouped"] == "patched"
    assert status["routing"] == "not used"
    assert {row["operator"] for row in state["calls"] if row["calls"]} >= {"topk_gate", "topk_sum_and_topk_group_idx"}
    assert re.search(r'tk_serving_calls_total\{.*operator="topk_gate".*\} [1-9]', page)
    assert "tk-serving" in log.read_text()
    assert re.search(r"routing-grouped +topk_gate +patched", log.read_text())


ENGINE = """
    import json, sys
    import sglang as sgl

    if __name__ == "__main__":
        engine = sgl.Engine(kernel_backend="tilekernels", **json.loads(sys.argv[1]))
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = engine.generate("the quick brown fox", sampling)
        state = engine.get_server_info()["internal_states"][0]["tk_serving"]
        print("RESULT " + json.dumps([answer["output_ids"], state]), flush=True)
        engine.shutdown()
"""


def test_the_engine_in_python(v3, tmp_path):
    """``Engine(kernel_backend=...)``, with one site and one operator switched off."""
    options = {
        "model_path": str(v3),
        "dtype": "bfloat16",
        "max_total_tokens": 512,
        "max_running_requests": 2,
        "mem_fraction_static": 0.3,
        "disable_decode_cuda_graph": True,
    }
    if DEVICE == "cpu":
        options |= {"device": "cpu", "attention_backend": "torch_native", "disable_overlap_schedule": True}
    script = tmp_path / "offline.py"
    script.write_text(textwrap.dedent(ENGINE))
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, **environment(tmp_path), "TK_SERVING_DISABLE": "routing,reduce_fused"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    tokens, state = json.loads(line.removeprefix("RESULT "))
    assert len(tokens) == 4
    status = {(row["site"], row["operator"]): (row["status"], row["reason"]) for row in state["sites"]}
    assert status["routing", "top2_sum_gate"] == ("switched off", "routing is in TK_SERVING_DISABLE")
    if DEVICE == "cpu":
        assert status["routed-experts", "swiglu_forward"] == ("switched off", "reduce_fused is in TK_SERVING_DISABLE")
    assert status["swiglu", "swiglu_forward"] == ("patched", "")
    assert {row["operator"] for row in state["calls"]} == {"swiglu_forward"}


def test_a_server_that_cannot_honour_the_flag_does_not_start(v3, tmp_path):
    arguments = engine.arguments(v3, "v3", DEVICE, False)
    command = [sys.executable, "-m", engine.SERVER, *arguments, "--kernel-backend", "tilekernels"]
    done = subprocess.run(
        [*command, "--enable-torch-compile"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment(tmp_path), "TK_SERVING_DISABLE": "no-such-site"},
    )
    assert done.returncode != 0
    assert "--kernel-backend tilekernels cannot be honoured:\n  - --enable-torch-compile" in done.stderr
    assert "\n  - TK_SERVING_DISABLE names no-such-site; known: " in done.stderr
