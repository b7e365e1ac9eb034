"""Counters of several processes, summed in a folder and shown to Prometheus."""

import json
import os
import subprocess
import sys

import pytest

from tk_serving import metrics

CHILD = """
import sys, torch
from tk_serving import metrics, moe
metrics.publish(sys.argv[1], lambda: [{"site": "s"}])
for _ in range(int(sys.argv[2])):
    moe.topk_gate(torch.randn(3, 8), 2)
"""


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "state"
    for calls in (2, 3):
        subprocess.run([sys.executable, "-c", CHILD, str(path), str(calls)], check=True, timeout=300)
    return path


def test_processes_write_what_they_counted_and_the_sum_is_read(folder):
    assert metrics.totals(folder) == [
        {"operator": "topk_gate", "implementation": "reference", "reason": "CPU tensors", "calls": 5}
    ]
    first, second = metrics.states(folder)
    assert first["pid"] != second["pid"]
    assert first["sites"] == [{"site": "s"}]
    assert not list(folder.glob("*.tmp"))


def test_files_of_ended_processes_can_be_cleared(folder):
    mine = folder / f"tk-serving-{os.getpid()}.json"
    mine.write_text(json.dumps({"pid": os.getpid(), "counters": [], "sites": []}))
    (folder / "other.json").write_text("{}")
    metrics.clear(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["other.json", mine.name]


def test_half_written_files_are_left_out(folder):
    (folder / "tk-serving-1.json").write_text('{"pid"')
    assert metrics.totals(folder)[0]["calls"] == 5


def test_prometheus_shows_the_sum(folder):
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector(str(folder)))
    line = 'tk_serving_calls_total{implementation="reference",operator="topk_gate",reason="CPU tensors"} 5.0'
    assert line in prometheus_client.generate_latest(registry).decode().splitlines()


def test_vllms_registries_show_the_sum(folder, tmp_path, monkeypatch):
    """One API server serves the global registry, several serve one that vLLM makes on the spot."""
    pytest.importorskip("vllm")
    import prometheus_client
    from vllm.v1.metrics import prometheus

    from tk_serving_vllm import report

    report.expose(str(folder))
    report.expose(str(folder))
    try:
        assert prometheus.get_prometheus_registry() is prometheus_client.REGISTRY
        assert b"tk_serving_calls_total{" in prometheus_client.generate_latest(prometheus_client.REGISTRY)
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        registry = prometheus.get_prometheus_registry()
        assert registry is not prometheus_client.REGISTRY
        assert b"tk_serving_calls_total{" in prometheus_client.generate_latest(registry)
    finally:
        prometheus_client.REGISTRY.unregister(report._collectors.pop(str(folder)))
        report._ledger.revert()
