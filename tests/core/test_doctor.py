"""What `tk-serving doctor` finds on machines that lack something, and the mend that it gives for each."""

import importlib.metadata
import json

import pytest

from tk_serving import environment, selftest
from tk_serving.cli import doctor
from tk_serving.compile import cache
from tk_serving.config import settings
from tk_serving.operator import FAMILIES, find

H800 = "NVIDIA H800, 580.95.05, 9.0, 81559 MiB"
A100 = "NVIDIA A100-SXM4-80GB, 580.95.05, 8.0, 81920 MiB"


@pytest.fixture(autouse=True)
def _settings():
    saved = dict(settings)
    yield
    for name, value in saved.items():
        setattr(settings, name, value)


def machine(torch="13.0", nvcc="13.0", devices=(H800,)):
    return {"packages": {"tilelang": "0.1.12"}, "cuda": {"nvcc": nvcc, "torch": torch, "devices": list(devices)}}


def only(findings):
    (finding,) = findings
    return finding


def failed(finding, detail, mend):
    assert finding.status == doctor.FAILED
    assert detail in finding.detail
    assert mend in finding.mend


@pytest.mark.parametrize(
    ("torch", "driver", "status", "detail", "mend"),
    [
        ("13.0", (13, 0), doctor.OK, "supports CUDA 13.0", ""),
        ("13.0", (12, 8), doctor.FAILED, "supports CUDA 12.8", "update the driver to 580 or newer"),
        ("13.0", None, doctor.FAILED, "there is no NVIDIA driver", "--gpus all"),
        (None, (13, 0), doctor.FAILED, "torch is a CPU build", "CUDA build of torch"),
        (None, None, doctor.SKIPPED, "no NVIDIA driver", ""),
    ],
)
def test_driver(monkeypatch, torch, driver, status, detail, mend):
    monkeypatch.setattr(environment, "driver_cuda", lambda: driver)
    finding = only(doctor._driver(machine(torch)))
    assert finding.status == status
    assert detail in finding.detail
    assert mend in finding.mend


def test_devices():
    eight = only(doctor._devices(machine(devices=[H800] * 8)))
    assert (eight.status, eight.detail) == (doctor.OK, f"8 x {H800}")
    failed(only(doctor._devices(machine(devices=[A100]))), "compute capability 9.0", "leave the flag off")
    failed(only(doctor._devices(machine(devices=[]))), "no NVIDIA GPU is visible", "CUDA_VISIBLE_DEVICES")
    assert only(doctor._devices(machine(torch=None, devices=[]))).status == doctor.SKIPPED


def test_toolkit(monkeypatch):
    monkeypatch.setattr(environment, "driver_cuda", lambda: (12, 8))
    failed(only(doctor._toolkit(machine(nvcc="13.0"))), "newer than the driver", "CUDA_HOME")
    settings.kernel_cache = ""
    failed(only(doctor._toolkit(machine(nvcc=None))), "no nvcc", "TK_SERVING_KERNEL_CACHE")
    settings.kernel_cache = "/somewhere"
    assert only(doctor._toolkit(machine(nvcc=None))).status == doctor.SKIPPED
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    failed(only(doctor._toolkit(machine(nvcc="12.8"))), "needs g++", "install g++")


def test_prebuilt_kernels(tmp_path, monkeypatch):
    settings.kernel_cache, settings.jit = "", "forbid"
    failed(only(doctor._prebuilt(machine())), "no cache is named", "tk-serving build")
    settings.kernel_cache = str(tmp_path)
    failed(only(doctor._prebuilt(machine())), "manifest.json is missing", f"tk-serving build --out {tmp_path}")
    manifest = {
        "format": cache.FORMAT, "fingerprint": cache.fingerprint(), "archs": ["sm_100a"], "models": ["v3"],
        "kernels": {}, "date": "2026-01-01",
    }  # fmt: skip
    (tmp_path / cache.MANIFEST).write_text(json.dumps(manifest))
    failed(only(doctor._prebuilt(machine())), "none for sm_90a", "tk-serving build --arch sm_100a,sm_90a --model v3")
    (tmp_path / cache.MANIFEST).write_text(json.dumps({**manifest, "archs": ["sm_90a"]}))
    assert only(doctor._prebuilt(machine())).status == doctor.OK


def test_folders(tmp_path):
    settings.jit, settings.local_cache, settings.state_dir = "allow", str(tmp_path / "new"), ""
    assert only(doctor._folders(machine())).status == doctor.OK
    (tmp_path / "new").chmod(0o777)
    failed(only(doctor._folders(machine())), "writable for every user", f"chmod o-w {tmp_path / 'new'}")
    (tmp_path / "file").write_text("")
    settings.jit, settings.state_dir = "forbid", str(tmp_path / "file" / "below")
    failed(only(doctor._folders(machine())), "Not a directory", "TK_SERVING_STATE_DIR")


def test_misspelt_settings(monkeypatch):
    monkeypatch.setenv("TK_SERVING_DISABEL", "topk_gate")
    failed(only(doctor._settings({})), "TK_SERVING_DISABEL is no setting", "did you mean TK_SERVING_DISABLE?")


def test_wrong_versions(monkeypatch):
    versions = {"tilelang": "0.2.0", "vllm": "0.31.0", "sglang": None, "typer": None}
    real = importlib.metadata.version

    def version(name):
        if versions.get(name, name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {(f.check, f.status): f for f in doctor._requirements(machine())}
    details = [f.detail for f in doctor._requirements(machine()) if f.check == "packages"]
    assert any("tilelang: expected" in detail and "got 0.2.0" in detail for detail in details)
    assert any("typer: expected >=0.15, got none" in detail for detail in details)
    failed(found["vllm", doctor.FAILED], "got 0.31.0", "pip install 'vllm")
    assert found["sglang", doctor.SKIPPED]
    monkeypatch.setattr(doctor, "DISTRIBUTION", "tk-serving-elsewhere")
    failed(only(doctor._requirements(machine())), "no installed distribution", "pip install")


def test_plugins(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: True if name == "vllm" else None)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = {f.check: f for f in doctor._plugins({})}
    assert found["vllm plugin"].status == doctor.OK
    assert found["sglang plugin"].status == doctor.SKIPPED
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    failed(next(doctor._plugins({})), "VLLM_PLUGINS=other keeps it out", "add tilekernels")
    broken = importlib.metadata.EntryPoint("tilekernels", "tk_serving_nowhere:register", "vllm.general_plugins")
    failed(doctor._loaded("vllm plugin", broken), "ModuleNotFoundError", "--force-reinstall")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    failed(next(doctor._plugins({})), "no entry point", "PYTHONPATH")


def test_self_test_finds_a_wrong_operator(monkeypatch):
    """The first operator of a family computes something else: the test says which."""
    op = find("batched_transpose")
    right = op.reference
    object.__setattr__(op, "reference", lambda x: right(x) + 1)
    try:
        if selftest.implementation()[0] != "simulator":
            pytest.skip("needs the simulator: g++ and the CUDA headers")
        outcome = selftest.run("transpose", "simulator", "cpu")
    finally:
        object.__setattr__(op, "reference", right)
    assert outcome.failure.startswith("batched_transpose: ")
    assert "elements differ" in outcome.failure


def test_self_test_covers_every_family(monkeypatch):
    monkeypatch.setattr(selftest, "implementation", lambda: ("simulator", "cpu"))
    monkeypatch.setattr(
        selftest, "run", lambda family, how, device: selftest.Outcome(family, ("op",), 0.1, "op: x" * (family == "moe"))
    )
    found = list(doctor._self_tests())
    assert [f.check for f in found] == [f"self-test {family}" for family in FAMILIES]
    failed(found[FAMILIES.index("moe")], "op: x", "TK_SERVING_DISABLE=op")
    monkeypatch.setattr(selftest, "implementation", lambda: ("", ""))
    assert only(doctor._self_tests()).status == doctor.SKIPPED
