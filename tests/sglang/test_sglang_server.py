"""The real engine: the demo (launch_server), the engine in Python, and the command that refuses to start one."""

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


ENGINE = """
    import json, sys
    import sglang as sgl

    if __name__ == "__main__":
        engine = sgl.Engine(kernel_backend="tilekernels", **json.loads(sys.argv[1]))
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = engine.generate("the quick brown fox", sampling)
        told = engine.get_server_info()
        state = told["internal_states"][0]["tk_serving"]
        print("RESULT " + json.dumps([answer["output_ids"], told["kernel_backend"], state]), flush=True)
        engine.shutdown()
"""


def test_the_engine_in_python(v2, tmp_path):
    """``Engine(kernel_backend=...)`` with a model of another class, one operator of which is switched off."""
    options = {
        "model_path": str(v2),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_total_tokens": 512,
        "max_running_requests": 2,
        "mem_fraction_static": 0.3,
        "disable_decode_cuda_graph": True,
        "log_level": "info",
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
        env={**os.environ, **environment(tmp_path), "TK_SERVING_DISABLE": "reduce_fused"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    tokens, backend, state = json.loads(line.removeprefix("RESULT "))
    assert len(tokens) == 4
    assert backend == "tilekernels"
    status = {(row["site"], row["operator"]): (row["status"], row["reason"]) for row in state["sites"]}
    assert status["routing-grouped", "topk_gate"] == ("patched", "")
    assert status["routing", "top2_sum_gate"][0] == "not used"
    if DEVICE == "cpu":
        assert status["routed-experts", "swiglu_forward"] == ("switched off", "reduce_fused is in TK_SERVING_DISABLE")
    assert status["swiglu", "swiglu_forward"] == ("patched", "")
    called = {row["operator"] for row in state["calls"] if row["calls"]}
    assert called == {"topk_gate", "topk_sum_and_topk_group_idx", "swiglu_forward"}
    assert re.search(r"routing-grouped +topk_gate +patched", done.stdout + done.stderr)


COMMAND = """
    # What the command "sglang" runs.
    from sglang.cli.main import main

    if __name__ == "__main__":
        main()
"""


def test_sglang_serve_does_not_start_what_cannot_honour_the_flag(v3, tmp_path):
    """The other command, up to where it would start the engine."""
    (tmp_path / "sglang_command.py").write_text(textwrap.dedent(COMMAND))
    arguments = ["serve", *engine.arguments(v3, "v3", DEVICE, False), "--kernel-backend", "tilekernels"]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_command", *arguments, "--enable-torch-compile"],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            **environment(tmp_path),
            "PYTHONPATH": str(tmp_path),
            "TK_SERVING_DISABLE": "no-such-site",
        },
    )
    assert done.returncode != 0
    assert "--kernel-backend tilekernels cannot be honoured:\n  - --enable-torch-compile" in done.stderr
    assert "\n  - TK_SERVING_DISABLE names no-such-site; known: " in done.stderr
