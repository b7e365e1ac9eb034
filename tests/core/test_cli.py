"""The command line, run as a user runs it."""

import json
import re
import subprocess
import sys

import pytest

from tk_serving.operator import operators


def tk_serving(*arguments, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-m", "tk_serving.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_a_wrong_setting_is_named():
    done = tk_serving("doctor", TK_SERVING_JIT="never")
    assert done.returncode == 1
    assert done.stderr.strip() == "tk-serving: TK_SERVING_JIT: expected 'allow', 'warn' or 'forbid', got 'never'"


def test_ops_lists_every_operator():
    done = tk_serving("ops", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["name"] for row in rows} == {op.name for op in operators()}
    for row in rows:
        assert {"name", "family", "phase", "kernel", "reference", "archs", "workloads"} <= row.keys()
        assert row["kernel"]
        assert row["workloads"]


def test_ops_shows_whole_names_in_a_narrow_terminal():
    done = tk_serving("ops", COLUMNS="80", FORCE_COLOR="1")
    words = set(re.sub(r"\x1b\[[\d;]*m", "", done.stdout).split())
    assert {f"{op.family}.{op.name}" for op in operators()} <= words


def test_ops_of_one_family():
    done = tk_serving("ops", "moe", "--json")
    assert {row["family"] for row in json.loads(done.stdout)} == {"moe"}
    wrong = tk_serving("ops", "mo")
    assert wrong.returncode == 2
    assert "expected one of engram, gemm" in " ".join(wrong.stderr.replace("│", " ").split())


def test_env_shows_versions_and_settings():
    done = tk_serving("env", "--json", TK_SERVING_DISABLE="topk_gate")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["packages"]["torch"]
    assert found["settings"]["TK_SERVING_DISABLE"] == "topk_gate"
    assert tk_serving("env").returncode == 0


def test_doctor_finds_nothing_broken_here():
    done = tk_serving("doctor")
    assert done.returncode == 0, done.stdout
    assert "ok  packages" in done.stdout


def test_doctor_as_json_has_a_mend_for_each_failure(tmp_path):
    done = tk_serving("doctor", "--json", "--no-self-test", TK_SERVING_KERNEL_CACHE=str(tmp_path))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["ok"]
    (failure,) = [finding for finding in report["findings"] if finding["status"] == "failed"]
    assert failure["check"] == "prebuilt kernels"
    assert "manifest.json is missing" in failure["detail"]
    assert "tk-serving build" in failure["mend"]


@pytest.mark.parametrize("command", ["env", "ops", "doctor", "demo"])
def test_every_command_explains_itself(command):
    done = tk_serving(command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout
