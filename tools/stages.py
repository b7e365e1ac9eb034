"""Run stages of the Makefile in lanes: one after the other within a lane, the lanes side by side.

    python tools/stages.py unit,ring2 engine sglang

The output of a stage is shown whole when it ends, and is in .cache/logs/<stage>.log meanwhile. A failed stage does not
stop the others; the last lines say how each ended, and the exit status is 1 if one failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

LOGS = Path(__file__).resolve().parents[1] / ".cache" / "logs"


class Lanes:
    """What ran so far: stage, exit status and seconds."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, int, float]] = []
        self._show = threading.Lock()

    def run(self, stages: list[str]) -> None:
        """Run the stages of one lane."""
        for stage in stages:
            log, start = LOGS / f"{stage}.log", time.monotonic()
            with log.open("w") as output:
                command = [os.environ.get("MAKE", "make"), "--no-print-directory", stage]
                status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
            with self._show:
                self.ended.append((stage, status, time.monotonic() - start))
                print(f"-- {stage} {'-' * 60}\n{log.read_text(errors='replace')}", flush=True)


def main(lanes: list[str]) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    ran = Lanes()
    threads = [threading.Thread(target=ran.run, args=(lane.split(","),), daemon=True) for lane in lanes]
    print(f"stages {', '.join(lanes)} side by side; what they print meanwhile: {LOGS}/*.log", flush=True)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("-" * 64)
    for stage, status, seconds in ran.ended:
        print(f"{stage:<12} {'ok' if status == 0 else 'FAILED':<8} {seconds:5.0f} s")
    return int(any(status for _, status, _ in ran.ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
