"""The README's table of supported models, from the records of both engines."""

import json
from pathlib import Path

from tk_serving.bench.e2e import support


def record(engine, version, model, phases, sites, operators, **more):
    difference = {"max_logprob_diff": 0.0123, **more}
    return {
        "engine": engine,
        "device": "NVIDIA H200",
        "versions": {engine: version},
        "rows": [{"model": model, "phase": phase, "ratio": ratio, **difference} for phase, ratio in phases.items()],
        "settings": {model: {"layers": 3}},
        "engines": {
            model: {
                "stock": {"sites": [], "counters": []},
                "ours": {
                    "sites": [[site, "", status, ""] for site, status in sites.items()],
                    "counters": [{"operator": name, "implementation": "kernel", "calls": 2} for name in operators],
                },
            }
        },
    }


EXPERTS = {
    "engine": "vllm",
    "device": "NVIDIA H200",
    "versions": {"vllm": "0.33.0"},
    "rows": [
        {"model": "v4-flash", "phase": "prefill 8000 tokens, experts upcast", "ratio": 1.2, "max_logprob_diff": 1}
    ],
    "engines": {"v4-flash": {"upcast": {"sites": [], "counters": []}}},
}


def test_one_table_has_both_engines(tmp_path, monkeypatch):
    folder = tmp_path / "docs/records"
    folder.mkdir(parents=True)
    itself = {"stock_from_itself": {"embedding moved": {"max_logprob_diff": 0.02}}}
    records = {
        "e2e-vllm-h200": record(
            "vllm", "0.33.0", "v4-flash", {"decode 1 sequence": 1.1}, {"mhc-pre": "patched"}, ["b"]
        ),
        "e2e-sglang-h200": record(
            "sglang", "0.5.23", "v3", {"prefill 8000 tokens": 1.05}, {"routing": "stock"}, ["a"], **itself
        ),
        "e2e-hopper-fp8-experts": EXPERTS,
    }
    for name, content in records.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{support.BEGIN}\nold\n{support.END}\nafter\n")
    monkeypatch.chdir(tmp_path)
    assert support.main([]) == 0
    before, *lines, after = [line for line in readme.read_text().splitlines() if line and not line.startswith("<!--")]
    assert (before, after) == ("before", "after")
    assert lines[2:] == [
        "| v3, 3 layers | sglang 0.5.23, NVIDIA H200 | `a` | `routing` | 0.0123; the engine from itself 0.02 | "
        "prefill 8000 tokens: 1.05 |",
        "| v4-flash, 3 layers | vllm 0.33.0, NVIDIA H200 | `b` | - | 0.0123 | decode 1 sequence: 1.10 |",
    ]


def test_the_least_damping_at_which_the_engine_agrees_with_itself_is_named():
    damped = {
        str(octaves): {"bounds_apply": octaves > 3, "max_logprob_diff": 0.1 / octaves, "stock_from_itself": {}}
        for octaves in (3, 5, 7)
    }
    found = support.table(
        [record("vllm", "0.33.0", "v3", {"decode": 1.1}, {}, [], damped=damped, equal=True)]
    ).splitlines()[-1]
    assert "| 0.0123; with sublayers damped by 2^5 0.02 (equal) |" in found


def test_ratios_of_the_kernels_stand_beside_those_of_the_steps():
    found = record("vllm", "0.33.0", "v3", {"decode": 0.99}, {}, [])
    found["rows"][0]["kernels_ratio"] = 1.079
    assert "| decode: 0.99 (kernels 1.08) |" in support.table([found])


def test_a_model_whose_speed_was_not_compared_has_a_line_with_its_outputs(tmp_path, monkeypatch):
    served = record("vllm", "0.33.0", "v3.2", {}, {"routing": "patched"}, ["a"])
    served["outputs"] = {"v3.2": {"max_logprob_diff": 0.0156}}
    folder = tmp_path / "docs/records"
    folder.mkdir(parents=True)
    (folder / "served-vllm-h200.json").write_text(json.dumps(served))
    (tmp_path / "README.md").write_text(f"{support.BEGIN}\n{support.END}\n")
    monkeypatch.chdir(tmp_path)
    support.main([])
    assert (
        "| v3.2, 3 layers | vllm 0.33.0, NVIDIA H200 | `a` | - | 0.0156 | not compared |"
        in (tmp_path / "README.md").read_text()
    )
    del served["outputs"]
    assert support.table([served]) == "No whole engine has been measured yet."


def test_without_a_record_there_is_no_empty_table():
    assert support.table([EXPERTS]) == "No whole engine has been measured yet."


def test_the_table_in_the_readme_is_that_of_the_records():
    root = Path(__file__).parents[2]
    records = [path for pattern in support.RECORDS for path in sorted(root.glob(pattern))]
    table = support.table([json.loads(path.read_text()) for path in records])
    readme = (root / "README.md").read_text()
    assert support.rewrite(readme, table) == readme, "run python -m tk_serving.bench.e2e.support"
