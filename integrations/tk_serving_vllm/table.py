"""Which call sites stay with vLLM because the benchmark record shows no gain there.

``table.json`` is generated from a record of ``tk-serving bench`` by ``python -m tk_serving_vllm.table RECORD``. For
every site and model it has the time of vLLM's kernels over ours, at the token counts that were measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tk_serving_patches.table import TOLERANCE, Table

FILE = Path(__file__).with_name("table.json")
PEER = "vllm"
TOLERANCE_COMPILED = 0.85
"""For hyper-connections: for every kernel of its own that vLLM needs there, it compiles eleven seconds long."""

NOT_COMPARABLE = ("shared-experts", "mhc-pre-broadcast", "routed-experts", "fp4-experts")
"""Sites that replace several kernels of vLLM by one, or whose record compares something else; they are never stock."""

LAYERS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "fp8-linear": lambda params: not params.get("groups"),
    "output-projection": lambda params: bool(params.get("groups")),
}
"""Sites of one operator whose workloads are layers of a model: by its parameters, whether a layer is the site's. The
times of a site's layers are added up."""

measured = Table(FILE, "vLLM", lambda site: TOLERANCE_COMPILED if site.startswith("mhc-") else TOLERANCE)
choose, forget, slower, verdict = measured.choose, measured.forget, measured.slower, measured.verdict


def generate(record: Mapping[str, Any], sites: Iterable[Any]) -> dict[str, Any]:
    """The table of a benchmark record.

    The operators of a site, or its layers, are added up at every token count; one without a kernel of vLLM there is
    left out on both sides.
    """
    found: dict[str, dict[str, dict[int, list[tuple[Mapping[str, Any], float, float]]]]] = {}
    for row in record["rows"]:
        theirs = [peer.get("us") for peer in row["peers"] if peer["name"] == PEER]
        if row["mode"] != "graph" or row["error"] or not theirs or theirs[0] is None:
            continue
        name = row["operator"].rpartition(".")[2]
        rows = found.setdefault(name, {}).setdefault(row["model"], {}).setdefault(row["tokens"], [])
        rows.append((row.get("params", {}), row["us"], theirs[0]))
    return {
        "record": {key: record[key] for key in ("device", "driver", "versions", "revision", "date")},
        "sites": {
            site.name: ratios
            for site in sites
            if site.operators
            and site.name not in NOT_COMPARABLE
            and (ratios := _ratios([_times(found.get(name, {}), LAYERS.get(site.name)) for name in site.operators]))
        },
    }


def _times(
    rows: Mapping[str, Mapping[int, list[tuple[Mapping[str, Any], float, float]]]],
    belongs: Callable[[Mapping[str, Any]], bool] | None,
) -> dict[str, dict[int, tuple[float, float]]]:
    """Our time of an operator and vLLM's, by model and tokens: of the last workload, or of all that are a site's."""
    times: dict[str, dict[int, tuple[float, float]]] = {}
    for model, by_tokens in rows.items():
        for tokens, measured in by_tokens.items():
            chosen = measured[-1:] if belongs is None else [row for row in measured if belongs(row[0])]
            if chosen:
                times.setdefault(model, {})[tokens] = (sum(row[1] for row in chosen), sum(row[2] for row in chosen))
    return times


def _ratios(operators: Sequence[Mapping[str, Mapping[int, tuple[float, float]]]]) -> dict[str, list[list[float]]]:
    result = {}
    for model in sorted({model for by_model in operators for model in by_model}):
        rows = [by_model.get(model, {}) for by_model in operators]
        counts = sorted({tokens for row in rows for tokens in row})
        times = {t: [row[t] for row in rows if t in row] for t in counts}
        result[model] = [[t, round(sum(x[1] for x in us) / sum(x[0] for x in us), 3)] for t, us in times.items()]
    return result


def _of_all_sites(record: Mapping[str, Any]) -> dict[str, Any]:
    from tk_serving_vllm.sites import SITES

    return generate(record, SITES)


if __name__ == "__main__":
    sys.exit(measured.main(_of_all_sites, sys.argv[1:]))
