"""Which call sites stay with vLLM because the benchmark record shows no gain there.

``table.json`` is generated from a record of ``tk-serving bench`` by ``python -m tk_serving_vllm.table RECORD``. For
every site and model it has the time of vLLM's kernels over ours, at the token counts that were measured.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("table.json")
PEER = "vllm"
TOLERANCE = 0.97
"""A site is slower where vLLM's time over ours is below this; what is between it and 1 is noise of the measurement."""

NOT_COMPARABLE = ("shared-experts", "mhc-pre-broadcast", "routed-experts", "fp4-experts")
"""Sites that replace several kernels of vLLM by one, or whose record compares something else; they are never stock."""

Ratios = tuple[tuple[int, float], ...]
_chosen: dict[str, Ratios] = {}


def choose(hidden_size: int, experts: int) -> None:
    """Use the rows of the measured model with these sizes; none if there is no such model."""
    from tk_serving.workloads import MODELS

    _chosen.clear()
    for model in MODELS:
        if (model.hidden_size, model.n_routed_experts) == (hidden_size, experts):
            for site, by_model in read()["sites"].items():
                if model.key in by_model:
                    _chosen[site] = tuple((int(t), ratio) for t, ratio in by_model[model.key])
    slower.cache_clear()


def forget() -> None:
    """Use no measurements: every site runs our operators."""
    _chosen.clear()
    slower.cache_clear()


@functools.lru_cache(maxsize=4096)
def slower(site: str, tokens: int) -> str | None:
    """Why a call of this many tokens stays with vLLM, or None: the nearest measured token count decides."""
    ratios = _chosen.get(site)
    if not ratios or not tokens:
        return None
    at, ratio = min(ratios, key=lambda row: (abs(math.log2(row[0] / tokens)), row[0]))
    return f"{ratio:.2f}x vLLM's speed at {at} tokens in the record" if ratio < TOLERANCE else None


def verdict(site: str) -> tuple[bool, str]:
    """Whether a site is slower at every measured token count, and what the start-up report says of it."""
    lost = [f"{ratio:.2f}x at {tokens}" for tokens, ratio in _chosen.get(site, ()) if ratio < TOLERANCE]
    if not lost:
        return False, ""
    everywhere = len(lost) == len(_chosen[site])
    return everywhere, f"{'' if everywhere else 'in part '}stock by table: {', '.join(lost)} tokens"


@functools.cache
def read() -> dict[str, Any]:
    """The generated table: ``record`` (device, versions, revision, date) and ``sites``."""
    return json.loads(FILE.read_text())


def generate(record: Mapping[str, Any], sites: Iterable[Any]) -> dict[str, Any]:
    """The table of a benchmark record.

    The operators of a site are added up at every token count; one without a kernel of vLLM there is left out on both
    sides.
    """
    measured: dict[str, dict[str, dict[int, tuple[float, float]]]] = {}
    for row in record["rows"]:
        theirs = [peer.get("us") for peer in row["peers"] if peer["name"] == PEER]
        if row["mode"] != "graph" or row["error"] or not theirs or theirs[0] is None:
            continue
        name = row["operator"].rpartition(".")[2]
        measured.setdefault(name, {}).setdefault(row["model"], {})[row["tokens"]] = (row["us"], theirs[0])
    return {
        "record": {key: record[key] for key in ("device", "driver", "versions", "revision", "date")},
        "sites": {
            site.name: ratios
            for site in sites
            if site.operators
            and site.name not in NOT_COMPARABLE
            and (ratios := _ratios([measured.get(name, {}) for name in site.operators]))
        },
    }


def _ratios(operators: Sequence[Mapping[str, Mapping[int, tuple[float, float]]]]) -> dict[str, list[list[float]]]:
    result = {}
    for model in sorted({model for by_model in operators for model in by_model}):
        rows = [by_model.get(model, {}) for by_model in operators]
        counts = sorted({tokens for row in rows for tokens in row})
        times = {t: [row[t] for row in rows if t in row] for t in counts}
        result[model] = [[t, round(sum(x[1] for x in us) / sum(x[0] for x in us), 3)] for t, us in times.items()]
    return result


def text(table: Mapping[str, Any]) -> str:
    """The file's content, one line for each site and model."""
    lines = [
        f"    {json.dumps(site)}: {{\n"
        + ",\n".join(f"      {json.dumps(model)}: {json.dumps(ratios)}" for model, ratios in by_model.items())
        + "\n    }"
        for site, by_model in sorted(table["sites"].items())
    ]
    return f'{{\n  "record": {json.dumps(table["record"])},\n  "sites": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def main(arguments: Sequence[str]) -> int:
    """Write the table of the record that is named."""
    from tk_serving_vllm.sites import SITES

    (record,) = arguments
    FILE.write_text(text(generate(json.loads(Path(record).read_text()), SITES)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
