"""Compiled kernels by launch and architecture: memory, prebuilt cache, local cache, compiler, in this order."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from tk_serving.compile import cache, pdl
from tk_serving.compile.targets import PASS_CONFIGS, arch_of, target
from tk_serving.config import settings
from tk_serving.plan import Launch

__all__ = [
    "KernelUnavailableError",
    "arch_of",
    "build",
    "built",
    "compilations",
    "cuda_source",
    "load",
    "loaded",
    "opened",
    "unavailable",
]

log = logging.getLogger(__name__)

_kernels: dict[tuple, Callable[..., Any]] = {}
_missing: set[tuple] = set()
_seconds: dict[str, list[float]] = {}
_lock = threading.RLock()


class KernelUnavailableError(RuntimeError):
    """A kernel was not built ahead of time and may not be compiled now."""


def load(launch: Launch, arch: str) -> Callable[..., Any]:
    """The compiled kernel of a launch. It is called with the run-time arguments of its ``prim_func``.

    Raises:
        KernelUnavailableError: it is in no cache and ``TK_SERVING_JIT=forbid``.
    """
    kernel = _kernels.get((arch, launch.key))
    return _load(launch, arch) if kernel is None else kernel


def unavailable(launch: Launch, arch: str) -> str:
    """Why the kernel cannot be loaded under ``TK_SERVING_JIT=forbid``; empty if it can.

    The disk is asked once: a kernel that was missing stays so for this process and these cache folders.
    """
    if (arch, launch.key) in _kernels:
        return ""
    asked = (arch, launch.key, settings.kernel_cache, settings.local_cache)
    if asked not in _missing:
        if cache.find(launch, arch) is not None:
            return ""
        _missing.add(asked)
    return f"{launch.kernel} was not built for this shape and TK_SERVING_JIT=forbid"


def loaded() -> int:
    """Kernels held in memory."""
    return len(_kernels)


def compilations() -> list[dict[str, Any]]:
    """What this process compiled so far: ``kernel``, ``compilations``, ``seconds``."""
    with _lock:
        rows = {kernel: list(seconds) for kernel, seconds in _seconds.items()}
    return [{"kernel": kernel, "compilations": len(s), "seconds": sum(s)} for kernel, s in sorted(rows.items())]


def build(launch: Launch, arch: str, folder: pathlib.Path) -> pathlib.Path:
    """Compile a launch into a cache folder. Needs nvcc, but no GPU."""
    from tilelang.jit import JITKernel

    prim_func = built(launch)
    # Not tilelang.compile: what that takes from TileLang's own cache cannot be exported.
    kernel = JITKernel(prim_func, target=target(arch), execution_backend="tvm_ffi", pass_configs=dict(PASS_CONFIGS))
    if settings.print_kernel_source:
        print(f"// {launch} {arch}\n{kernel.get_kernel_source()}")
    return cache.store(kernel, str(prim_func.attrs["global_symbol"]), launch, arch, folder)


def built(launch: Launch) -> Any:
    """The TileLang function that is compiled for a launch."""
    return pdl.waiting(launch.prim_func(), launch.trigger_last) if launch.pdl else launch.prim_func()


def cuda_source(launch: Launch, arch: str) -> str:
    """The CUDA C++ that TileLang generates for a launch; needs neither nvcc nor a GPU."""
    import tilelang
    from tilelang import tvm

    goal = tvm.target.Target(target(arch))
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), goal:
        lowered = tilelang.lower(built(launch), target=goal, enable_host_codegen=False, enable_device_compile=False)
    return lowered.kernel_source


def _load(launch: Launch, arch: str) -> Callable[..., Any]:
    with _lock:
        key = (arch, launch.key)
        if key in _kernels:
            return _kernels[key]
        file = cache.find(launch, arch)
        if file is None or settings.print_kernel_source:
            if settings.jit == "forbid":
                raise KernelUnavailableError(unavailable(launch, arch))
            if settings.jit == "warn":
                log.warning("compiling %s for %s: it was not built ahead of time", launch, arch)
            start = time.perf_counter()
            file = build(launch, arch, cache.local())
            _seconds.setdefault(launch.kernel, []).append(time.perf_counter() - start)
        _kernels[key] = opened(file)
        return _kernels[key]


@functools.cache
def opened(file: pathlib.Path) -> Callable[..., Any]:
    """The kernel in a file whose checksum was verified; a file is named by its content and opened once."""
    import tvm_ffi

    _runtime()
    return tvm_ffi.load_module(str(file))[file.name.rpartition("-")[0]]


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The launch runtime that compiled kernels link to. Loading it alone spares a server the import of TileLang."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise KernelUnavailableError("tilelang is not installed; pip install 'tilelang>=0.1.12,<0.2'")
    return ctypes.CDLL(os.path.join(os.path.dirname(spec.origin), "lib", "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
