"""Compiled kernels on disk: a local cache that grows, and read-only caches that were built ahead of time.

Both hold one shared library for each launch and architecture, named by content, so that a file is either right or not
found. A prebuilt cache has a manifest as well; it is used whole or, with the reason, not at all. Loading a kernel runs
its code: no folder is used that every user of the machine may write to, and no file unless the manifest vouches for it.

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
import re
import stat
import tempfile
from collections.abc import Iterable
from typing import Any

from tk_serving.compile import pdl
from tk_serving.compile.targets import PASS_CONFIGS
from tk_serving.config import settings
from tk_serving.plan import Launch

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
SOURCES = (".py", ".cuh")


_refused: set[str] = set()


class CacheRefusedError(ValueError):
    """A prebuilt cache does not belong to this installation."""


@functools.cache
def fingerprint() -> dict[str, str]:
    """What a compiled kernel depends on besides its launch and architecture."""
    package = pathlib.Path(__file__).resolve().parents[1]
    # Kernels take constants from the contracts' helpers beside them, so a family counts whole.
    families = [kernels.parent for kernels in package.glob("*/kernels")]
    settings_of_all = json.dumps(PASS_CONFIGS, sort_keys=True), pathlib.Path(pdl.__file__).read_text()
    return {
        "kernels": source_digest(package, families, *settings_of_all),
        "tilelang": importlib.metadata.version("tilelang"),
        "apache-tvm-ffi": importlib.metadata.version("apache-tvm-ffi"),
    }


def source_digest(root: pathlib.Path, folders: Iterable[pathlib.Path], *more: str) -> str:
    """Hash of every source file in the folders, with its place below ``root``, and of further texts."""
    sources = hashlib.sha256("".join(more).encode())
    for file in sorted(file for folder in folders for file in folder.rglob("*") if file.suffix in SOURCES):
        sources.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return sources.hexdigest()


def digest(launch: Launch, arch: str) -> str:
    """Name of one compiled kernel: a hash of the fingerprint, the architecture and the launch."""
    text = json.dumps([fingerprint(), arch, [repr(part) for part in launch.key]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def find(launch: Launch, arch: str) -> pathlib.Path | None:
    """The compiled kernel, from the prebuilt cache if there is one, else from the local cache.

    A prebuilt cache whose files change while it is in use is not used from then on.
    """
    ahead = prebuilt()
    found = None
    if ahead is not None:
        try:
            found = ahead.find(launch, arch)
        except CacheRefusedError as error:
            log.error("prebuilt kernels are not used from now on: %s", error)
            _refused.add(settings.kernel_cache)
    return found or _in(local(), launch, arch)


def local() -> pathlib.Path:
    """Folder of kernels compiled on this machine; one for this process alone where the usual one is not safe."""
    return _safe(usual())


def usual() -> pathlib.Path:
    """Where kernels compiled on this machine should go: ``TK_SERVING_LOCAL_CACHE``, else below the user's caches."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(settings.local_cache or os.path.join(base, "tk-serving", "kernels"))


@functools.cache
def _safe(folder: pathlib.Path) -> pathlib.Path:
    reason = unsafe(folder)
    if not reason:
        return folder
    private = tempfile.TemporaryDirectory(prefix="tk-serving-kernels-")
    log.warning("kernels are compiled into a temporary folder: %s", reason)
    _private.append(private)
    return pathlib.Path(private.name)


_private: list[tempfile.TemporaryDirectory[str]] = []  # removed at exit


def unsafe(path: pathlib.Path) -> str:
    """Why others could exchange what is at a path, with the mend; empty if they cannot, or if nothing is there."""
    for place in (path, *path.resolve().parents):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue
        # In a sticky folder such as /tmp only the owner of an entry may exchange it.
        if mode & stat.S_IWOTH and (place == path or not mode & stat.S_ISVTX):
            return f"{place} is writable for every user of this machine; chmod o-w {place}"
    return ""


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
        CacheRefusedError: no manifest, another format, built from other kernels or with other versions, writable for
            everybody, or with a file that is missing or not the one that the manifest lists.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._refuse_if(unsafe(folder))
        self.manifest = self._read()
        if self.manifest.get("format") != FORMAT:
            raise CacheRefusedError(f"{folder}: expected format {FORMAT}, got {self.manifest.get('format')}")
        for name, value in fingerprint().items():
            built = self.manifest["fingerprint"].get(name)
            if built != value:
                raise CacheRefusedError(
                    f"{folder}: expected {name} {value[:16]}, got {str(built)[:16]}; build it again"
                )
        for name, entry in self.manifest["kernels"].items():
            self._verified(name, entry)

    def find(self, launch: Launch, arch: str) -> pathlib.Path | None:
        """The kernel file, its checksum verified once more.

        Raises:
            CacheRefusedError: the file is missing or differs from what the manifest lists.
        """
        name = digest(launch, arch)
        entry = self.manifest["kernels"].get(name)
        return None if entry is None else self._verified(name, entry)

    def _read(self) -> dict[str, Any]:
        file = self.folder / MANIFEST
        try:
            manifest = json.loads(file.read_text())
        except FileNotFoundError:
            raise CacheRefusedError(
                f"{self.folder}: {MANIFEST} is missing; make one with `tk-serving build --out`"
            ) from None
        except (OSError, ValueError) as error:
            raise CacheRefusedError(f"{self.folder}: {MANIFEST} is damaged: {error}") from None
        self._refuse_if(unsafe(file))
        return manifest

    def _verified(self, name: str, entry: dict[str, str]) -> pathlib.Path:
        if not re.fullmatch(rf"[a-z0-9_]+/\w+-{name}\.so", entry["file"]):
            raise CacheRefusedError(f"{self.folder}: {MANIFEST} is damaged: {entry['file']} is no kernel's name")
        file = self.folder / entry["file"]
        for path in (file, file.parent):
            self._refuse_if(unsafe(path))
        if not file.is_file() or checksum(file) != entry["sha256"]:
            raise CacheRefusedError(f"{file}: missing or damaged; build the cache again")
        return file

    def _refuse_if(self, reason: str) -> None:
        if reason:
            raise CacheRefusedError(f"{self.folder}: {reason}")


def prebuilt() -> Prebuilt | None:
    """The cache that ``TK_SERVING_KERNEL_CACHE`` names, or None. A refused cache is reported once."""
    return _prebuilt(settings.kernel_cache) if settings.kernel_cache and settings.kernel_cache not in _refused else None


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
