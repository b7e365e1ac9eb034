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
    monkeypatch.setattr(kernels, "_kernels", {})
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
        "import sys, pathlib; from tk_serving.compile import ahead;"
        f"assert ahead.load_all(pathlib.Path({str(copy)!r}), {ARCH!r}) == 1; assert 'tilelang' not in sys.modules"
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
    file = next((copy / ARCH).glob("*.so"))
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(cache.CacheRefusedError, match="missing or damaged"):
        cache.Prebuilt(copy).find(_launch(), ARCH)


def test_digest_depends_on_launch_and_architecture():
    one, other = _launch(), find("topk_gate").plan(torch.empty(4, 256, device="meta"), 6).launches[0]
    assert len({cache.digest(one, ARCHS[0]), cache.digest(one, ARCHS[1]), cache.digest(other, ARCHS[0])}) == 3


def test_helpers_beside_the_kernels_count(tmp_path):
    """Kernels import constants from them; a stale kernel must not be found."""
    helper = tmp_path / "quant" / "scales.py"
    helper.parent.mkdir()
    helper.write_text("FLOOR = 1e-4")
    before = cache.source_digest(tmp_path, [helper.parent])
    helper.write_text("FLOOR = 1e-10")
    assert cache.source_digest(tmp_path, [helper.parent]) != before


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
