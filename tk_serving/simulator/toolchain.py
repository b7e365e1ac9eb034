"""Finding the headers and compilers, and building shared libraries into a cache that is addressed by content."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tk_serving.config import settings
from tk_serving.simulator import ptx
from tk_serving.simulator.errors import SimulationError

RUNTIME = Path(__file__).with_name("runtime")

_CXX_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-w",
    "-fpermissive",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-exceptions",
    "-fwrapv",
    "-g1",
    # Every memory access calls the checks of memory.cpp; other undefined behaviour on which CPU and GPU differ, too.
    "-fsanitize=thread,alignment,bounds,shift-exponent,float-cast-overflow,integer-divide-by-zero",
    "--param=tsan-instrument-func-entry-exit=0",
    "-DENABLE_BF16",
    "-D__CUDA_ARCH_LIST__=900",
)


def cache() -> Path:
    """The folder of everything that is built."""
    return Path(settings.simulator_cache or Path(tempfile.gettempdir()) / f"tk-serving-simulator-{os.getuid()}")


@functools.cache
def cuda_includes() -> tuple[Path, ...]:
    """Folders with the CUDA headers: of CUDA_HOME or CUDA_PATH, of nvcc's toolkit, or of NVIDIA's PyPI packages."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        # nvcc may be a script in another folder; it reports where its toolkit is.
        dry_run = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True
        ).stderr
        if top := re.search(r"(?m)^#\$ TOP=(.*)$", dry_run):
            homes.append(Path(top[1].strip()))
        homes.append(Path(nvcc).resolve().parent.parent)
    roots = [home.resolve() / "include" for home in homes]
    for site in sys.path:
        nvidia = Path(site or ".") / "nvidia"
        roots += sorted(nvidia.glob("cu1*/include"), reverse=True) + sorted(nvidia.glob("cuda_*/include"))
    complete = next((root for root in roots if _has(root, "cuda.h", "cuda_fp8.h")), None)
    if complete is None:
        raise SimulationError(
            "CUDA headers not found: set CUDA_HOME, or pip install "
            "nvidia-cuda-runtime nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl"
        )
    # Packages of one release may be spread over several folders; the C++ library moved below include/cccl.
    found = [complete, *(root for root in roots if root != complete and root.is_dir() and "nvidia" in root.parts)]
    return tuple(folder for root in found for folder in (root, root / "cccl") if folder.is_dir())


def _cuda_version() -> tuple[int, int]:
    text = (cuda_includes()[0] / "cuda.h").read_text(errors="replace")
    found = re.search(r"#define CUDA_VERSION (\d+)", text)
    version = int(found[1]) if found else 13000
    return version // 1000, version % 1000 // 10


def _has(root: Path, *names: str) -> bool:
    return all((root / name).is_file() for name in names)


@functools.cache
def tilelang_root() -> Path:
    import tilelang

    return Path(tilelang.__file__).resolve().parent


@functools.cache
def tilelang_version() -> str:
    import tilelang

    return str(tilelang.__version__)


@functools.cache
def host_includes() -> tuple[Path, ...]:
    """Folders with the headers of TVM's C interface."""
    from tvm_ffi import libinfo

    return (
        tilelang_root() / "3rdparty" / "tvm" / "include",
        Path(libinfo.find_include_path()),
        Path(libinfo.find_dlpack_include_path()),
    )


def digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:24]


def write(file: Path, text: str) -> None:
    """Write a file that other processes see whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
    os.replace(temporary, file)


@functools.cache
def _environment() -> str:
    """Digest of what every build depends on besides its own source: contents, not places, so that checkouts share."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    sources = [p.read_bytes() for p in sorted(RUNTIME.iterdir())] + [Path(ptx.__file__).read_bytes()]
    headers = sorted(cuda_includes()[0].glob("cuda*.h*"))
    sources += [part for header in headers for part in (header.name.encode(), header.read_bytes())]
    versions = [tilelang_version(), importlib.metadata.version("apache-tvm-ffi")]
    return digest(compiler, *versions, " ".join(_CXX_FLAGS), *sources)


def run(command: Sequence[str | Path]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        raise SimulationError(f"{command[0]} not found: the simulator needs g++ and gcc") from None


def wait(process: subprocess.Popen[str], what: str) -> None:
    stderr = process.communicate()[1]
    if process.returncode:
        errors = [line for line in stderr.splitlines() if "error" in line] or stderr.splitlines()
        raise SimulationError(f"{what}: the compiler failed:\n" + "\n".join(errors[:12]))


def _publish(work: Path, target: Path) -> None:
    """Move a finished folder into place, whole."""
    work.chmod(0o755)
    shutil.rmtree(target, ignore_errors=True)  # the rest of a build that was killed
    work.rename(target)


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process at a time builds a target; the others find it when they come in."""
    locks = cache() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / target.name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        yield


@functools.cache
def _common(root: Path) -> Path:
    """Folder with what all kernels share: TileLang's templates without asm, the precompiled header, the scheduler."""
    target = root / f"common-{_environment()}"
    with _alone(target):
        if not target.is_dir():
            _build_common(root, target)
    return target


def _build_common(root: Path, target: Path) -> None:
    work = Path(tempfile.mkdtemp(dir=root, prefix="tmp-"))
    shutil.copytree(tilelang_root() / "src" / "tl_templates", work / "tl_templates")
    for path in (work / "tl_templates" / "cuda").rglob("*"):
        if path.suffix in (".h", ".cuh", ".hpp"):
            text = path.read_text()
            # Branches for devices whose functions exist here too.
            changed = re.sub(
                r"defined\(__CUDA_ARCH__\) && \(__CUDA_ARCH__ >= (530|800|900)\)$", "1", ptx.translate(text), flags=re.M
            )
            changed = changed.replace("defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)", "1")
            if changed != text:
                path.write_text(changed)
    for source in RUNTIME.iterdir():
        shutil.copy(source, work)
    scheduler = run(
        [
            "g++",
            "-std=c++20",
            "-O2",
            "-fPIC",
            "-shared",
            work / "scheduler.cpp",
            work / "memory.cpp",
            "-o",
            work / "libscheduler.so",
        ]
    )
    header = run(["g++", "-x", "c++-header", *_flags(work), work / "device.h", "-o", work / "device.h.gch"])
    wait(scheduler, "scheduler")
    wait(header, "device.h")
    _publish(work, target)


def common() -> Path:
    return _common(cache())


def _flags(common: Path) -> list[str]:
    includes = [common, tilelang_root() / "3rdparty" / "cutlass" / "include", *cuda_includes(), *host_includes()]
    major, minor = _cuda_version()
    version = (f"-D__CUDACC_VER_MAJOR__={major}", f"-D__CUDACC_VER_MINOR__={minor}")
    return [
        *_CXX_FLAGS,
        *version,
        *(part for folder in includes for part in ("-isystem" if folder != common else "-I", str(folder))),
    ]


def build(name: str, device: str, host: str) -> Path:
    """The shared library of one translated kernel, from the cache or compiled now."""
    shared = common()
    target = cache() / f"{name}-{digest(_environment(), device, host)}"
    library = target / "kernel.so"
    if not library.is_file():
        with _alone(target):
            if not library.is_file():
                _build(name, device, host, shared, target)
    return library


def _build(name: str, device: str, host: str, shared: Path, target: Path) -> None:
    work = Path(tempfile.mkdtemp(dir=cache(), prefix="tmp-"))
    try:
        (work / "kernel.cpp").write_text(device)
        (work / "host.c").write_text(host)
        host_flags = [
            "-w",
            "-O1",
            "-fPIC",
            "-I",
            shared,
            *(part for folder in host_includes() for part in ("-I", folder)),
        ]
        host_build = run(["gcc", *host_flags, "-c", work / "host.c", "-o", work / "host.o"])
        device_build = run(["g++", *_flags(shared), "-c", work / "kernel.cpp", "-o", work / "kernel.o"])
        try:
            wait(host_build, f"{name} (host code)")
        finally:
            wait(device_build, name)
        wait(run(["g++", "-shared", work / "kernel.o", work / "host.o", "-o", work / "kernel.so"]), name)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    for spare in ("kernel.o", "host.o"):
        (work / spare).unlink()
    _publish(work, target)
