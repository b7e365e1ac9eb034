"""What /metrics says: calls, fallbacks by reason, compilations and their seconds."""

import json

import pytest

from tk_serving import metrics

STATE = {
    "counters": [
        {"operator": "topk_gate", "implementation": "kernel", "reason": "", "calls": 7},
        {"operator": "topk_gate", "implementation": "engine", "reason": "float16 logits", "calls": 2},
        {"operator": "topk_gate", "implementation": "nothing", "reason": "no tokens", "calls": 1},
    ],
    "compilations": [{"kernel": "moe.topk_gate", "compilations": 2, "seconds": 3.5}],
    "sites": [],
}


@pytest.fixture
def folder(tmp_path):
    for pid in (1, 2):
        (tmp_path / f"tk-serving-{pid}.json").write_text(json.dumps({"pid": pid, **STATE}))
    return str(tmp_path)


def test_metrics(folder):
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector(folder))
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'tk_serving_calls_total{implementation="engine",operator="topk_gate",reason="float16 logits"} 4.0',
        'tk_serving_calls_total{implementation="kernel",operator="topk_gate",reason=""} 14.0',
        'tk_serving_calls_total{implementation="nothing",operator="topk_gate",reason="no tokens"} 2.0',
        'tk_serving_fallbacks_total{operator="topk_gate",reason="float16 logits"} 4.0',
        'tk_serving_jit_compilations_total{kernel="moe.topk_gate"} 4.0',
        'tk_serving_jit_compilation_seconds_total{kernel="moe.topk_gate"} 7.0',
    ]


def test_states_of_older_processes_have_no_compilations(tmp_path):
    old = {name: value for name, value in STATE.items() if name != "compilations"}
    (tmp_path / "tk-serving-1.json").write_text(json.dumps({"pid": 1, **old}))
    assert metrics.compilations(str(tmp_path)) == []
