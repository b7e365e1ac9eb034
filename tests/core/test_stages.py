"""The stages of `make test`: side by side, each shown whole, and a failure neither stops the others nor gets lost."""

import os
import subprocess
import sys
from pathlib import Path

STAGES = Path(__file__).parents[2] / "tools" / "stages.py"
MAKE = """#!/bin/sh
echo "begin $2"; sleep 0.2; echo "end $2"
case $2 in broken*) exit 2;; esac
"""


def test_every_stage_runs_and_failures_are_named(tmp_path):
    make = tmp_path / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    command = [sys.executable, str(STAGES), "broken-stage,after-broken", "fine-stage"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "MAKE": str(make)})
    assert done.returncode == 1
    stages = ("broken-stage", "after-broken", "fine-stage")
    for stage in stages:
        assert f"begin {stage}\nend {stage}\n" in done.stdout
    *_, first, second, third = (line.split()[:2] for line in done.stdout.splitlines())
    assert sorted([first, second, third]) == [["after-broken", "ok"], ["broken-stage", "FAILED"], ["fine-stage", "ok"]]


def test_the_makefile_names_stages_that_exist():
    makefile = (STAGES.parents[1] / "Makefile").read_text()
    (lanes,) = [line.split("tools/stages.py ")[1] for line in makefile.splitlines() if "tools/stages.py " in line]
    for stage in lanes.replace(",", " ").split():
        assert f"\n{stage}: setup" in makefile
