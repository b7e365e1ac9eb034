"""Run the tests of this folder with several versions of transformers.

    python tests/transformers/matrix.py [VERSION ...]

Each version lives in ``.cache/transformers/<version>`` and hides the installed one; it is downloaded once. Arguments
after ``--`` go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parent.parent / ".cache" / "transformers"
VERSIONS = ("5.16.0", "5.20.0", "5.24.0")
HUB_BEFORE_2 = ("5.16.", "5.17.")  # need huggingface_hub 1.x


def folder(version: str) -> Path:
    """The folder of a version, installed if need be."""
    place = CACHE / version
    if not (place / "transformers" / "__init__.py").exists():
        hub = ["huggingface_hub>=1.5,<2"] if version.startswith(HUB_BEFORE_2) else []
        install = ["install", "--quiet", "--no-deps", "--no-compile", "--target", str(place)]
        subprocess.run([sys.executable, "-m", "pip", *install, f"transformers=={version}", *hub], check=True)
    return place


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, options = arguments[:split], arguments[split + 1 :]
    failed = []
    for version in versions or VERSIONS:
        path = os.pathsep.join(filter(None, (str(folder(version)), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "EXPECTED_TRANSFORMERS": version}
        print(f"transformers {version}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", str(HERE), *options]
        if subprocess.run(command, env=environment).returncode:
            failed.append(version)
    if failed:
        print(f"failed with transformers {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
