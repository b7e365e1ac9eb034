"""Facts about the machine and this checkout, from the programs that know them."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess


def output(command: list[str]) -> str:
    """What a command prints, stripped; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def nvcc_version() -> str:
    """The line of ``nvcc --version`` that has the release; empty without an nvcc in CUDA_HOME or on PATH."""
    nvcc = os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc") if os.environ.get("CUDA_HOME") else shutil.which("nvcc")
    return next((line for line in output([nvcc, "--version"]).splitlines() if "release " in line), "") if nvcc else ""


def revision() -> str:
    """Git revision of this checkout, or ``unknown`` outside one."""
    root = pathlib.Path(__file__).resolve().parents[1]
    return output(["git", "-C", str(root), "describe", "--always", "--dirty"]) or "unknown"
