"""Compiled kernels on disk: a local cache that grows, and read-only caches that were built ahead of time.

Both hold one shared library for each launch and architecture, named by content, so that a file is either right or not
found. A prebuilt cache has a manifest as well; it is used whole or, with the reason, not at all.

    <folder>/manifest.json                      prebuilt caches only
    <folder>/<arch>/<symbol>-<digest>.so
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

from tk_serving.compile.targets import PASS_CONFIGS
from tk_serving.config import settings
from tk_serving.plan import Launch

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1


class CacheRefusedError(ValueError):
    """A prebuilt cache does not belong to this installation."""


@functools.cache
def fingerprint() -> dict[str, str]:
    """What a compiled kernel depends on besides its launch and architecture."""
    package = pathlib.Path(__file__).resolve().parents[1]
    # Kernels take constants from the contracts' helpers beside them, so a family counts whole.
    families = [kernels.parent for kernels in package.glob("*/kernels")]
    return {
        "kernels": source_digest(package, families, json.dumps(PASS_CONFIGS, sort_keys=True)),
        "tilelang": importlib.metadata.version("tilelang"),
        "apache-tvm-ffi": importlib.metadata.version("apache-tvm-ffi"),
    }


def source_digest(root: pathlib.Path, folders: Iterable[pathlib.Path], *more: str) -> str:
    """Hash of every Python file in the folders, with its place below ``root``, and of further texts."""
    sources = hashlib.sha256("".join(more).encode())
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        sources.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return sources.hexdigest()


def digest(launch: Launch, arch: str) -> str:
    """Name of one compiled kernel: a hash of the fingerprint, the architecture and the launch."""
    text = json.dumps([fingerprint(), arch, [repr(part) for part in launch.key]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def find(launch: Launch, arch: str) -> pathlib.Path | None:
    """The compiled kernel, from the prebuilt cache if there is one, else from the local cache."""
    ahead = prebuilt()
    found = ahead.find(launch, arch) if ahead else None
    return found or _in(local(), launch, arch)


def local() -> pathlib.Path:
    """Folder of kernels compiled on this machine."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(settings.local_cache or os.path.join(base, "tk-serving", "kernels"))


def store(kernel: Any, symbol: str, launch: Launch, arch: str, folder: pathlib.Path) -> pathlib.Path:
    """Write a compiled kernel. Safe when several processes compile the same one: the file appears whole."""
    target = folder / arch / f"{symbol}-{digest(launch, arch)}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        kernel.export_library(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    return target


class Prebuilt:
    """A read-only cache with a manifest.

    Raises:
        CacheRefusedError: no manifest, another format, or built from other kernels or with other versions.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        try:
            self.manifest = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            raise CacheRefusedError(
                f"{folder}: {MANIFEST} is missing; make one with `tk-serving build --out`"
            ) from None
        except ValueError as error:
            raise CacheRefusedError(f"{folder}: {MANIFEST} is damaged: {error}") from None
        if self.manifest.get("format") != FORMAT:
            raise CacheRefusedError(f"{folder}: expected format {FORMAT}, got {self.manifest.get('format')}")
        for name, value in fingerprint().items():
            built = self.manifest["fingerprint"].get(name)
            if built != value:
                raise CacheRefusedError(
                    f"{folder}: expected {name} {value[:16]}, got {str(built)[:16]}; build it again"
                )

    def find(self, launch: Launch, arch: str) -> pathlib.Path | None:
        """The kernel file, its checksum verified.

        Raises:
            CacheRefusedError: the file is missing or differs from what the manifest lists.
        """
        entry = self.manifest["kernels"].get(digest(launch, arch))
        if entry is None:
            return None
        file = self.folder / entry["file"]
        if not file.exists() or checksum(file) != entry["sha256"]:
            raise CacheRefusedError(f"{file}: missing or damaged; build the cache again")
        return file


def prebuilt() -> Prebuilt | None:
    """The cache that ``TK_SERVING_KERNEL_CACHE`` names, or None. A refused cache is reported once."""
    return _prebuilt(settings.kernel_cache) if settings.kernel_cache else None


def refusal() -> str:
    """Why the cache of ``TK_SERVING_KERNEL_CACHE`` is not used; empty if it is, or if none is named."""
    if not settings.kernel_cache:
        return ""
    try:
        Prebuilt(pathlib.Path(settings.kernel_cache))
    except CacheRefusedError as error:
        return str(error)
    return ""


def checksum(file: pathlib.Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def _prebuilt(folder: str) -> Prebuilt | None:
    try:
        return Prebuilt(pathlib.Path(folder))
    except CacheRefusedError as error:
        log.warning("prebuilt kernels are not used: %s", error)
        return None


def _in(folder: pathlib.Path, launch: Launch, arch: str) -> pathlib.Path | None:
    return next((folder / arch).glob(f"*-{digest(launch, arch)}.so"), None)
