"""Which call sites stay with SGLang because the record shows no gain there.

``table.json`` is generated from a record of :mod:`tk_serving_sglang.measure` by
``python -m tk_serving_sglang.table RECORD``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tk_serving_patches import table

measured = table.Table(Path(__file__).with_name("table.json"), "SGLang")


def generate(record: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a record: the worst ratio where a site has several cases."""
    worst: dict[str, dict[str, dict[int, float]]] = {}
    for row in record["rows"]:
        if "ratio" in row:
            at = worst.setdefault(row["site"], {}).setdefault(row["model"], {})
            at[row["tokens"]] = min(row["ratio"], at.get(row["tokens"], row["ratio"]))
    return {
        "record": {key: record[key] for key in ("device", "versions", "revision", "date")},
        "sites": {
            site: {model: [[t, ratio] for t, ratio in sorted(at.items())] for model, at in by_model.items()}
            for site, by_model in worst.items()
        },
    }


if __name__ == "__main__":
    sys.exit(measured.main(generate, sys.argv[1:]))
