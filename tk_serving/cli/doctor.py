"""``tk-serving doctor``: can kernels run here, and if not, why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import typer
from rich.console import Console

from tk_serving.cli.env import collect
from tk_serving.compile import cache
from tk_serving.config import settings
from tk_serving.dispatch import MIN_CAPABILITY


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. ``ok`` is None where the check does not apply."""

    check: str
    ok: bool | None
    detail: str


def diagnose() -> list[Finding]:
    """Run every check; creates no CUDA context."""
    found = collect()
    checks: tuple[Callable[[dict], Finding], ...] = (_tilelang, _nvcc, _device, _cache, _plugin, _engine)
    return [check(found) for check in checks]


def doctor() -> None:
    """Check whether kernels can run on this machine; exit with 1 if something is broken."""
    console = Console()
    findings = diagnose()
    for finding in findings:
        mark = {True: "[green]ok[/]", False: "[red]no[/]", None: "[dim]--[/]"}[finding.ok]
        console.print(f"{mark}  {finding.check}: {finding.detail}", highlight=False)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


def _tilelang(found: dict) -> Finding:
    version = found["packages"]["tilelang"]
    if version is None:
        return Finding("TileLang", False, "not installed; pip install 'tilelang>=0.1.12,<0.2'")
    if importlib.util.find_spec("tilelang") is None:
        return Finding("TileLang", False, f"{version} is installed but cannot be found for import")
    return Finding("TileLang", True, version)


def _nvcc(found: dict) -> Finding:
    version = found["cuda"]["nvcc"]
    if version is None:
        return Finding("nvcc", None, "not found: only kernels that were built ahead of time can run (set CUDA_HOME)")
    return Finding("nvcc", True, version)


def _device(found: dict) -> Finding:
    devices = found["cuda"]["devices"]
    if not devices:
        return Finding("device", None, "no NVIDIA GPU: CPU tensors run the torch references")
    if found["cuda"]["torch"] is None:
        return Finding("device", False, f"{devices[0]}, but torch is a CPU build; install a CUDA build of torch")
    capability = tuple(int(part) for part in devices[0].split(", ")[2].split("."))
    if capability < MIN_CAPABILITY:
        return Finding("device", False, f"{devices[0]}: compute capability 9.0 or higher is needed")
    return Finding("device", True, devices[0])


def _cache(found: dict) -> Finding:
    if not settings.kernel_cache:
        return Finding(
            "prebuilt kernels", None, "TK_SERVING_KERNEL_CACHE is not set: kernels are compiled on first use"
        )
    reason = cache.refusal()
    return Finding("prebuilt kernels", not reason, reason or settings.kernel_cache)


def _plugin(found: dict) -> Finding:
    names = [entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")]
    if "tilekernels" in names:
        return Finding("vLLM plugin", True, "entry point tilekernels is registered")
    return Finding(
        "vLLM plugin", False, "entry point tilekernels is missing: install tk-serving with pip, not by PYTHONPATH"
    )


def _engine(found: dict) -> Finding:
    engines = {name: found["packages"][name] for name in ("vllm", "sglang") if found["packages"][name]}
    if not engines:
        return Finding("engine", None, "neither vLLM nor SGLang is installed here")
    return Finding("engine", True, ", ".join(f"{name} {version}" for name, version in engines.items()))
