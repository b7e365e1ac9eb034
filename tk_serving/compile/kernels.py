"""Compiled kernels by launch and architecture: one compile for each shape class, then a dictionary look-up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from tk_serving.compile.targets import PASS_CONFIGS, arch_of, target
from tk_serving.config import settings
from tk_serving.plan import Launch

__all__ = ["arch_of", "cuda_source", "load", "loaded", "unavailable"]

log = logging.getLogger(__name__)

_kernels: dict[tuple, Callable[..., Any]] = {}
_lock = threading.Lock()


def load(launch: Launch, arch: str) -> Callable[..., Any]:
    """The compiled kernel of a launch, built on first use."""
    kernel = _kernels.get((arch, launch.key))
    return _build(launch, arch) if kernel is None else kernel


def unavailable(launch: Launch, arch: str) -> str:
    """Why the kernel cannot be loaded while compiling is forbidden; empty if it can."""
    if (arch, launch.key) in _kernels:
        return ""
    return f"{launch.kernel} was not built for this shape and TK_SERVING_JIT=forbid"


def loaded() -> int:
    """Kernels held in memory."""
    return len(_kernels)


def cuda_source(launch: Launch, arch: str) -> str:
    """The CUDA C++ that TileLang generates for a launch; needs neither nvcc nor a GPU."""
    import tilelang
    from tilelang import tvm

    goal = tvm.target.Target(target(arch))
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), goal:
        lowered = tilelang.lower(launch.prim_func(), target=goal, enable_host_codegen=False, enable_device_compile=False)
    return lowered.kernel_source


def _build(launch: Launch, arch: str) -> Callable[..., Any]:
    import tilelang

    with _lock:
        key = (arch, launch.key)
        if key in _kernels:
            return _kernels[key]
        if settings.jit == "warn":
            log.warning("compiling %s for %s: it was not built ahead of time", launch, arch)
        kernel = tilelang.compile(
            launch.prim_func(), target=target(arch), execution_backend="tvm_ffi", pass_configs=dict(PASS_CONFIGS)
        )
        if settings.print_kernel_source:
            print(f"// {launch} {arch}\n{kernel.get_kernel_source()}")
        _kernels[key] = kernel
        return kernel
