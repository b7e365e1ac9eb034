"""The examples run as they are described."""

import json
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fine_tuning(tmp_path):
    output = run("finetune_deepseek_tiny.py", "--steps", "3", "--batch", "2", "--out", str(tmp_path / "plot.png"))
    assert "Mean difference of the losses: 0.0" in output
    assert "skipped" not in output
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_layer_benchmark(tmp_path):
    run("bench_deepseek_layer.py", "--tiny", "--tokens", "32", "--rounds", "1", "--out", str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["left to transformers"] == {}
    for name, row in record["parts"].items():
        assert row["outputs differ by"] < 0.1, name
        assert row["forward"]["ratio"] > 0
