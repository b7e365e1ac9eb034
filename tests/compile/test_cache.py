"""Kernels built ahead of time: relocatable, checked, used whole or not at all."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from tk_serving.compile import ahead, cache, kernels
from tk_serving.compile.targets import ARCHS, arch_of
from tk_serving.config import settings
from tk_serving.operator import find

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None and not os.environ.get("CUDA_HOME"), reason="nvcc is needed to build kernels"
)

ARCH = "sm_90a"


def _jobs() -> list[ahead.Job]:
    return [job for job in ahead.jobs(["v3"], [ARCH]) if job.operator == "topk_gate"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("built")
    results = ahead.build(_jobs(), folder, workers=1)
    assert [result.error for result in results] == [""]
    ahead.write_manifest(folder, results, ["v3"], [ARCH])
    return folder


@pytest.fixture
def copy(built, tmp_path) -> pathlib.Path:
    """The cache at another place: it is relocatable."""
    return pathlib.Path(shutil.copytree(built, tmp_path / "elsewhere"))


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    saved = dict(settings)
    settings.local_cache = str(tmp_path / "local")
    for name in ("_kernels", "_seconds"):
        monkeypatch.setattr(kernels, name, {})
    monkeypatch.setattr(kernels, "_missing", set())
    monkeypatch.setattr(cache, "_refused", set())
    cache._prebuilt.cache_clear()
    cache._safe.cache_clear()
    yield
    for name, value in saved.items():
        setattr(settings, name, value)


def _launch():
    return find("topk_gate").plan(torch.empty(4, 256, device="meta"), 8).launches[0]


def test_kernel_of_a_copied_cache_loads_without_a_compiler(copy):
    settings.kernel_cache, settings.jit = str(copy), "forbid"
    assert kernels.unavailable(_launch(), ARCH) == ""
    kernel = kernels.load(_launch(), ARCH)
    with pytest.raises(RuntimeError, match="device_type"):  # it is the GPU kernel: it refuses CPU tensors itself
        kernel(torch.zeros(4, 256), torch.zeros(4, 8, dtype=torch.int64))


def test_a_server_loads_prebuilt_kernels_without_importing_tilelang(copy):
    probe = (
        "import sys, pathlib; from tk_serving.compile import ahead, kernels;"
        f"assert ahead.load_all(pathlib.Path({str(copy)!r}), {ARCH!r}) == 1; assert 'tilelang' not in sys.modules;"
        "assert kernels.opened.cache_info().currsize == 1"
    )
    env = {**os.environ, "TK_SERVING_JIT": "forbid", "TK_SERVING_KERNEL_CACHE": str(copy), "PATH": "/nonexistent"}
    env.pop("CUDA_HOME", None)
    done = subprocess.run([sys.executable, "-c", probe], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_missing_kernel_is_named_when_compiling_is_forbidden(copy):
    settings.kernel_cache, settings.jit = str(copy), "forbid"
    other = find("topk_gate").plan(torch.empty(4, 77, device="meta"), 3).launches[0]
    with pytest.raises(kernels.KernelUnavailableError, match=r"moe.topk_gate was not built .* TK_SERVING_JIT=forbid"):
        kernels.load(other, ARCH)


def test_compiled_kernel_is_kept_for_the_next_process(tmp_path):
    assert cache.find(_launch(), ARCH) is None
    kernels.load(_launch(), ARCH)
    assert cache.find(_launch(), ARCH).parent == tmp_path / "local" / ARCH
    assert not list((tmp_path / "local" / ARCH).glob("tmp*"))


@pytest.mark.parametrize("name", ["kernels", "tilelang"])
def test_foreign_cache_is_refused_with_the_reason(copy, name, caplog):
    manifest = json.loads((copy / cache.MANIFEST).read_text())
    manifest["fingerprint"][name] = "other"
    (copy / cache.MANIFEST).write_text(json.dumps(manifest))
    settings.kernel_cache = str(copy)
    assert f"expected {name}" in cache.refusal()
    assert cache.find(_launch(), ARCH) is None, "never half-used"


def test_damaged_cache_is_refused(copy):
    settings.kernel_cache = str(copy)
    (copy / cache.MANIFEST).write_text("{")
    assert "damaged" in cache.refusal()
    (copy / cache.MANIFEST).unlink()
    assert "tk-serving build" in cache.refusal()


def test_damaged_kernel_file_is_refused(copy):
    settings.kernel_cache = str(copy)
    _tamper(copy)
    with pytest.raises(cache.CacheRefusedError, match="missing or damaged"):
        cache.Prebuilt(copy)
    assert cache.find(_launch(), ARCH) is None


def test_kernel_file_that_changes_while_the_cache_is_in_use_is_not_loaded(copy, caplog):
    settings.kernel_cache, settings.jit = str(copy), "forbid"
    assert cache.find(_launch(), ARCH) is not None
    _tamper(copy)
    with pytest.raises(kernels.KernelUnavailableError):
        kernels.load(_launch(), ARCH)
    assert "not used from now on" in caplog.text
    assert cache.prebuilt() is None


def _tamper(folder):
    file = next((folder / ARCH).glob("*.so"))
    file.write_bytes(file.read_bytes() + b"x")


@pytest.mark.parametrize("place", [".", ARCH, cache.MANIFEST, "kernel", ".."])
def test_cache_that_everybody_may_write_to_is_refused(copy, place):
    settings.kernel_cache = str(copy)
    assert cache.refusal() == ""
    path = next((copy / ARCH).glob("*.so")) if place == "kernel" else (copy / place).resolve()
    path.chmod(path.stat().st_mode | 0o002)
    assert f"chmod o-w {path}" in cache.refusal()
    assert cache.find(_launch(), ARCH) is None


def test_sticky_parent_such_as_tmp_is_fine(copy):
    copy.parent.chmod(0o1777)
    assert cache.unsafe(copy) == ""


@pytest.mark.parametrize("file", ["../{name}", "/tmp/{name}", "sm_90a/../../{name}", "sm_90a/other.so"])
def test_manifest_cannot_name_other_files(copy, file):
    manifest = json.loads((copy / cache.MANIFEST).read_text())
    for entry in manifest["kernels"].values():
        entry["file"] = file.format(name=pathlib.Path(entry["file"]).name)
    (copy / cache.MANIFEST).write_text(json.dumps(manifest))
    settings.kernel_cache = str(copy)
    assert "is no kernel's name" in cache.refusal()


def test_local_folder_that_everybody_may_write_to_is_replaced(tmp_path, caplog):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    settings.local_cache = str(folder)
    replacement = cache.local()
    assert replacement not in (folder, *folder.iterdir())
    assert replacement.stat().st_mode & 0o077 == 0
    assert f"chmod o-w {folder}" in caplog.text
    assert cache.local() == replacement


def test_the_disk_is_asked_once_for_a_missing_kernel(copy, monkeypatch):
    settings.kernel_cache, settings.jit = str(copy), "forbid"
    other = find("topk_gate").plan(torch.empty(4, 77, device="meta"), 3).launches[0]
    asked = []
    monkeypatch.setattr(cache, "find", lambda launch, arch: asked.append(launch))
    reasons = {kernels.unavailable(other, ARCH) for _ in range(3)}
    assert len(asked) == 1
    assert "TK_SERVING_JIT=forbid" in reasons.pop()
    settings.kernel_cache = str(copy / "another")
    kernels.unavailable(other, ARCH)
    assert len(asked) == 2, "another cache is asked again"


def test_compilations_are_counted_with_their_seconds():
    kernels.load(_launch(), ARCH)
    kernels.load(_launch(), ARCH)
    (row,) = kernels.compilations()
    assert (row["kernel"], row["compilations"]) == ("moe.topk_gate", 1)
    assert row["seconds"] > 0.1


def test_digest_depends_on_launch_and_architecture():
    one, other = _launch(), find("topk_gate").plan(torch.empty(4, 256, device="meta"), 6).launches[0]
    assert len({cache.digest(one, ARCHS[0]), cache.digest(one, ARCHS[1]), cache.digest(other, ARCHS[0])}) == 3


@pytest.mark.parametrize("name", ["scales.py", "kernels/product.cuh"])
def test_helpers_beside_the_kernels_count(tmp_path, name):
    """Kernels take constants and device functions from them; a stale kernel must not be found."""
    helper = tmp_path / "quant" / name
    helper.parent.mkdir(parents=True)
    helper.write_text("FLOOR = 1e-4")
    before = cache.source_digest(tmp_path, [tmp_path / "quant"])
    helper.write_text("FLOOR = 1e-10")
    assert cache.source_digest(tmp_path, [tmp_path / "quant"]) != before


def test_fingerprint_covers_whole_families(monkeypatch):
    hashed = []
    monkeypatch.setattr(cache, "source_digest", lambda root, folders, *_: hashed.extend(folders) or "")
    cache.fingerprint.__wrapped__()
    assert {"quant", "moe", "mhc", "engram", "transpose", "transform"} <= {folder.name for folder in hashed}


def test_architecture_of_a_device():
    assert arch_of((9, 0)) == "sm_90a"
    assert arch_of((10, 0)) == "sm_100a"


def test_command_builds_a_cache(tmp_path):
    wrong = subprocess.run(
        [sys.executable, "-m", "tk_serving.cli", "build", "--out", str(tmp_path), "--model", "v5"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "got v5" in " ".join(wrong.stderr.split())
