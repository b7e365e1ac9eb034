"""Facts about the machine and this checkout, from the programs that know them."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
import sys


def output(command: list[str]) -> str:
    """What a command prints, stripped; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def nvcc() -> str:
    """The CUDA compiler as TileLang finds it: of ``CUDA_HOME``, on PATH, or of NVIDIA's PyPI packages; may be empty."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which(os.path.join(home, "bin", "nvcc")) or ""
    packaged = (str(file) for site in sys.path for file in pathlib.Path(site or ".").glob("nvidia/cu*/bin/nvcc"))
    return shutil.which("nvcc") or next(packaged, "")


def nvcc_version() -> str:
    """The line of ``nvcc --version`` that has the release; empty without an nvcc."""
    return next((line for line in output([nvcc(), "--version"]).splitlines() if "release " in line), "")


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the installed driver supports; None without a driver. Creates no context."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


def revision() -> str:
    """Git revision of this checkout, or ``unknown`` outside one."""
    root = pathlib.Path(__file__).resolve().parents[1]
    return output(["git", "-C", str(root), "describe", "--always", "--dirty"]) or "unknown"
