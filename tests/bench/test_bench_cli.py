"""``tk-serving bench`` as a user runs it, on a machine without a GPU, and ``pytest --run-benchmark``."""

import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from tk_serving.bench import machine
from tk_serving.cli import app

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="refusals of a machine without a GPU")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})


@without_gpu
def test_it_refuses_without_a_gpu_and_says_what_is_missing():
    done = run("-m", "tk_serving.cli", "bench", "moe", "--tokens", "1,64,4096")
    assert done.returncode == 2
    assert done.stderr.startswith("bench: this machine lacks ")
    assert "CUDA build of torch" in done.stderr or "NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topk_gat"], "expected a declared operator such as topk_gate"),
        (["nothing"], "expected a declared operator (`tk-serving ops` lists them), got 'nothing'"),
        (["--model", "v5"], "bench: model: expected one of v3"),
        (["--peers", "vlm"], "bench: peers: expected some of reference, compile, deepgemm"),
        (["--mode", "hot"], "bench: mode: expected some of graph, cold, got 'hot'"),
        (["--chain", "v5"], "bench: chain: expected some of v3, v4-flash, v3:routing, v4-flash:routing, got 'v5'"),
        (["--tokens", "0"], "bench: tokens: expected positive numbers, got 0"),
        (["--tokens", "1;64"], "bench: tokens: expected numbers, comma-separated, got '1;64'"),
        (["--site", "vllm"], "bench: site: expected ENGINE=FOLDER"),
        (["--e2e", "vlm"], "bench: e2e: expected one of vllm, sglang, got 'vlm'"),
        (["--e2e", "vllm", "--model", "v5"], "bench: model: expected one of v3"),
        (["--from", "/nowhere.json"], "No such file"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_dry_run_lists_rows_and_peers():
    done = bench("topk_gate", "--model", "v3", "--tokens", "1,64", "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert "reference, compile" in done.stdout
    assert "2 rows" in done.stdout
    assert "hyper-connections" in bench("--chain", "v4-flash", "--dry-run").stdout


def test_records_are_shown_and_compared_without_a_gpu(record, row, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    record([row(us=10.0)]).save(old)
    record([row(us=20.0)]).save(new)
    done = bench("--from", old, "--page", tmp_path / "page.md")
    assert done.exit_code == 0, done.stderr
    assert "moe.topk_gate" in done.stdout
    assert (tmp_path / "page.md").exists()
    done = bench("--compare", old, new)
    assert done.exit_code == 1
    assert "1 slower" in done.stdout
    assert bench("--compare", old, old).exit_code == 0


def test_missing_matplotlib_is_noticed_before_measuring(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')")
    done = run("-m", "tk_serving.cli", "bench", "topk_gate", "--plot", "a.png", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "--plot needs matplotlib" in done.stderr


def test_engines_of_the_end_to_end_benchmark_take_further_arguments(monkeypatch):
    from tk_serving.bench import e2e

    options = []
    monkeypatch.setattr(machine, "missing", list)
    monkeypatch.setattr(e2e, "run", lambda given: options.append(given) or {"rows": []})
    done = bench("--e2e", "vllm", "--model", "v3", "--arguments", '{"tensor_parallel_size": 2}')
    assert done.exit_code == 0, done.output
    assert [(one.model, one.arguments) for one in options] == [("v3", {"tensor_parallel_size": 2})]
    assert not options[0].one_gpu
    for text in ("[2]", "{"):
        done = bench("--e2e", "vllm", "--arguments", text)
        assert (done.exit_code, len(options)) == (2, 1)
        assert "--arguments: expected a JSON object" in done.output


@pytest.mark.parametrize("equal", [True, False])
def test_ranks_on_one_gpu_pass_by_their_outputs(monkeypatch, equal):
    from tk_serving.bench import e2e

    options = []
    monkeypatch.setattr(machine, "missing", list)
    monkeypatch.setattr(
        e2e, "run", lambda given: options.append(given) or {"rows": [], "outputs": {"a": {"equal": equal}}}
    )
    two = ("--e2e", "vllm", "--model", "v3", "--arguments", '{"tensor_parallel_size": 2}', "--one-gpu")
    assert bench(*two).exit_code == (0 if equal else 1)
    assert [one.one_gpu for one in options] == [True]
    assert bench("--e2e", "vllm", "--one-gpu").exit_code == 2


def test_nothing_else_imports_the_benchmarks():
    code = (
        "import sys, tk_serving.cli, tk_serving.operator as o; o.operators(); print('tk_serving.bench' in sys.modules)"
    )
    assert run("-c", code).stdout.strip() == "False"


def test_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.missing()[0].startswith("an NVIDIA GPU with its driver")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert machine.missing()[0] == "compute capability 9.0 or higher: NVIDIA A100 has 8.0"


@without_gpu
def test_pytest_flag_refuses_without_a_gpu():
    done = run("-m", "pytest", "-q", "--run-benchmark", "tests/transpose/test_transpose.py", "-p", "no:cacheprovider")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--run-benchmark: this machine lacks" in done.stderr


@pytest.mark.parametrize(
    ("files", "operators"),
    [
        (["tests/moe/test_topk_gate.py"], ["topk_gate"]),
        (["tests/moe/test_topk_gate.py", "tests/bench/test_bench_cli.py"], ["topk_gate"]),
        (["tests/transpose/test_transpose.py"], ["transpose"]),
        (["tests/core/test_cli.py"], []),
    ],
)
def test_operators_of_test_files(files, operators):
    from tk_serving.bench.pytest_summary import operators_of

    assert operators_of(files) == operators
