"""Which call sites stay with an engine because measurements show no gain there.

A table is generated from a record: for every site and model it has the time of the engine's kernels over ours, at the
token counts that were measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TOLERANCE = 0.97
"""A site is slower where the engine's time over ours is below this; what is between it and 1 is noise."""

Ratios = tuple[tuple[int, float], ...]


class Table:
    """The measurements of one engine, and those of them that the running model uses.

    Args:
        file: JSON with ``record`` (device, versions, revision, date) and ``sites``.
        engine: its name in reasons.
        tolerance: by the name of a site, where :data:`TOLERANCE` does not fit it.
    """

    def __init__(self, file: Path, engine: str, tolerance: Callable[[str], float] = lambda site: TOLERANCE) -> None:
        self.file, self.engine, self.tolerance = file, engine, tolerance
        self._chosen: dict[str, Ratios] = {}
        self.slower = functools.lru_cache(maxsize=4096)(self._slower)
        """Why a call of so many tokens stays with the engine, or None: the nearest measured token count decides."""

    def read(self) -> dict[str, Any]:
        """What the file holds."""
        return json.loads(self.file.read_text())

    def choose(self, hidden_size: int, experts: int) -> None:
        """Use the rows of the measured model with these sizes; none if there is no such model."""
        from tk_serving.workloads import MODELS

        self.forget()
        for model in MODELS:
            if (model.hidden_size, model.n_routed_experts) == (hidden_size, experts):
                for site, by_model in self.read()["sites"].items():
                    if model.key in by_model:
                        self._chosen[site] = tuple((int(t), ratio) for t, ratio in by_model[model.key])

    def forget(self) -> None:
        """Use no measurements: every site runs our operators."""
        self._chosen.clear()
        self.slower.cache_clear()

    def _slower(self, site: str, tokens: int) -> str | None:
        ratios = self._chosen.get(site)
        if not ratios or not tokens:
            return None
        at, ratio = min(ratios, key=lambda row: (abs(math.log2(row[0] / tokens)), row[0]))
        return (
            f"{ratio:.2f}x {self.engine}'s speed at {at} tokens in the record" if ratio < self.tolerance(site) else None
        )

    def verdict(self, site: str) -> tuple[bool, str]:
        """Whether a site is slower at every measured token count, and what the start-up report says of it."""
        lost = [
            f"{ratio:.2f}x at {tokens}" for tokens, ratio in self._chosen.get(site, ()) if ratio < self.tolerance(site)
        ]
        if not lost:
            return False, ""
        everywhere = len(lost) == len(self._chosen[site])
        return everywhere, f"{'' if everywhere else 'in part '}stock by table: {', '.join(lost)} tokens"

    def main(self, make: Callable[[Any], Mapping[str, Any]], arguments: Sequence[str]) -> int:
        """Write the table that ``make`` makes of a record; ``arguments`` name the record's file."""
        parser = argparse.ArgumentParser(description=f"Write the table of the sites that stay with {self.engine}.")
        parser.add_argument("record", type=Path)
        file = parser.parse_args(arguments).record
        try:
            self.file.write_text(text(make(json.loads(file.read_text()))))
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"record: expected the measurements that the table is made of, got {file}: {error!r}")
        return 0


def text(table: Mapping[str, Any]) -> str:
    """A file's content, one line for each site and model."""
    lines = [
        f"    {json.dumps(site)}: {{\n"
        + ",\n".join(f"      {json.dumps(model)}: {json.dumps(ratios)}" for model, ratios in by_model.items())
        + "\n    }"
        for site, by_model in sorted(table["sites"].items())
    ]
    return f'{{\n  "record": {json.dumps(table["record"])},\n  "sites": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
