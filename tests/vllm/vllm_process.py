"""vLLM's CPU engine in a process of its own, so that what one test loads and patches is not there for the next."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def result(*arguments: str, timeout: float, **environment: str) -> Any:
    """What a Python process with these arguments prints as ``RESULT {json}``.

    Raises:
        AssertionError: it fails; the message is the end of its errors.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **ENVIRONMENT, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def v4_result(script: str, folder: Path, timeout: float, **environment: str) -> Any:
    """The same of a script of this folder, with a folder that has the tiny V4 model's configuration."""
    shutil.copy(HERE / "tiny_v4.json", folder / "config.json")
    (folder / "generation_config.json").write_text("{}")
    return result(str(HERE / script), str(folder), timeout=timeout, **environment)
