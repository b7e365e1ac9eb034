"""Where the simulator finds what it builds with, and its cache."""

import os
import subprocess
import sys

import pytest

from tk_serving.config import settings
from tk_serving.simulator import SimulationError, ptx, toolchain

BUILD_ONE = """
import torch
from tk_serving import simulator
from tk_serving.plan import Launch
kernel = simulator.load(Launch("moe.topk_gate", {"num_experts": 8, "num_topk": 2}, None))
ids = torch.zeros(1, 2, dtype=torch.int64)
kernel(torch.arange(8.0)[None], ids)
assert ids.tolist() == [[7, 6]]
print(kernel._path)
"""


def process(cache, script=BUILD_ONE, **environment):
    environment = {**os.environ, "TK_SERVING_SIMULATOR_CACHE": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(started):
    out, errors = started.communicate()
    assert started.returncode == 0, errors
    return out.strip()


def test_processes_share_a_cache(tmp_path):
    both = [process(tmp_path), process(tmp_path)]
    paths = {finish(started) for started in both}
    assert len(paths) == 1
    assert sorted(p.name.split("-")[0] for p in tmp_path.iterdir()) == ["common", "locks", "lowered", "moe.topk_gate"]
    before = os.stat(next(iter(paths))).st_mtime_ns
    assert finish(process(tmp_path)) in paths
    assert os.stat(next(iter(paths))).st_mtime_ns == before


def test_default_cache_is_per_user(monkeypatch):
    monkeypatch.setattr(settings, "simulator_cache", "")
    assert str(os.getuid()) in toolchain.cache().name


def layout(root, *files):
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#define CUDA_VERSION 12080\n")


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No toolkit anywhere."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    toolchain.cuda_includes.cache_clear()
    yield tmp_path
    toolchain.cuda_includes.cache_clear()


def test_headers_of_cuda_home(bare, monkeypatch):
    layout(bare / "toolkit" / "include", "cuda.h", "cuda_fp8.h", "cccl/cuda/atomic")
    monkeypatch.setenv("CUDA_HOME", str(bare / "toolkit"))
    include = bare / "toolkit" / "include"
    assert toolchain.cuda_includes() == (include, include / "cccl")
    assert toolchain._cuda_version() == (12, 8)


def test_headers_of_pypi_packages_in_one_folder(bare):
    include = bare / "nvidia" / "cu13" / "include"
    layout(include, "cuda.h", "cuda_fp8.h", "cccl/cuda/atomic")
    assert toolchain.cuda_includes() == (include, include / "cccl")


def test_headers_of_pypi_packages_in_folders_of_their_own(bare):
    nvidia = bare / "nvidia"
    layout(nvidia, "cuda_runtime/include/cuda.h", "cuda_runtime/include/cuda_fp8.h")
    layout(nvidia, "cuda_nvcc/include/crt/host_defines.h", "cuda_cccl/include/cuda/atomic")
    found = toolchain.cuda_includes()
    assert found[0] == nvidia / "cuda_runtime" / "include"
    assert {nvidia / "cuda_nvcc" / "include", nvidia / "cuda_cccl" / "include"} < set(found)


def test_no_headers(bare):
    with pytest.raises(SimulationError, match="CUDA headers not found: set CUDA_HOME, or pip install"):
        toolchain.cuda_includes()


def test_no_compiler(bare):
    with pytest.raises(SimulationError, match=r"g\+\+ not found"):
        toolchain.run(["g++", "--version"])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(f(a, ")")));', 'sim::barrier_wait((id), (f(a, ")")),'),
        ('asm("redux.sync.max.s32 %0, %1, %2;" : "=r"(x) : "r"(v), "r"(m));', "(x) = __reduce_max_sync((m), (v));"),
        ('asm("mov.u32 %0, %laneid;" : "=r"(x));', "(x) = sim::lane();"),
        ('asm volatile("fence.proxy.async;" ::: "memory");', "(void)0;"),
        ('asm("tcgen05.alloc %0;" :: "r"(x));', 'sim::fail("unknown PTX: %s", "tcgen05.alloc %0");'),
        (
            'asm("{\\n .reg .pred p;\\n setp.ne.b32 p, %2, 0;\\n @p st.global.u32 [%0], %1;\\n}\\n"'
            ' :: "l"(q), "r"(d), "r"((int)c));',
            "if (((int)c)) *(unsigned*)((q)) = (d);",
        ),
        ("int asmx = 1; // no asm", "int asmx = 1; // no asm"),
    ],
)
def test_ptx(source, expected):
    assert ptx.translate(source).startswith(expected)


def test_translation_keeps_line_numbers():
    source = 'a\nasm volatile("fence;"\n  :\n  :\n);\nb'
    assert ptx.translate(source).splitlines().index("b") == source.splitlines().index("b")
