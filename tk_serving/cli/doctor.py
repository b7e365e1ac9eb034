"""``tk-serving doctor``: can kernels run here, do they compute the right things, and if not, what to do about it."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from rich.console import Console

from tk_serving import environment
from tk_serving.cli.env import collect
from tk_serving.compile import cache
from tk_serving.compile.kernels import arch_of
from tk_serving.config import Settings, settings
from tk_serving.dispatch import MIN_CAPABILITY
from tk_serving.operator import FAMILIES

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
DISTRIBUTION = "tk-serving"
TESTED_TILELANG = ("0.1.12", "0.1.15")
PLUGINS = {"vllm": ("vllm.general_plugins", "VLLM_PLUGINS"), "sglang": ("sglang.srt.plugins", "SGLANG_PLUGINS")}
"""For each engine the group of its entry points, and the variable that narrows which of them it loads."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: what was looked at.
        status: ``ok``, ``failed``, or ``skipped`` where the check does not apply here.
        detail: what was found.
        mend: for a failure, what to do about it.
    """

    check: str
    status: str
    detail: str
    mend: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    self_test: Annotated[
        bool, typer.Option(help="Run operators of every family on this device against the references.")
    ] = True,
) -> None:
    """Check whether kernels can run on this machine and are right; exit with 1 if something is broken."""
    findings, console = [], Console(soft_wrap=True)
    for finding in diagnose(self_test):
        findings.append(finding)
        if not as_json:
            mark = {OK: "[green]ok[/]", FAILED: "[red]no[/]", SKIPPED: "[dim]--[/]"}[finding.status]
            console.print(f"{mark}  [bold]{finding.check}[/]: ", end="", highlight=False)
            console.print(finding.detail, markup=False, highlight=False)
            if finding.mend:
                console.print(f"      mend: {finding.mend}", markup=False, highlight=False)
    failed = sum(finding.status == FAILED for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    elif failed:
        console.print(f"{failed} of {len(findings)} checks failed")
    raise typer.Exit(1 if failed else 0)


def diagnose(self_test: bool = True) -> Iterator[Finding]:
    """Run every check. Without the self-test no CUDA context is created."""
    found = collect()
    checks: tuple[Callable[[dict[str, Any]], Iterator[Finding]], ...] = (
        _settings,
        _requirements,
        _driver,
        _devices,
        _toolkit,
        _prebuilt,
        _folders,
        _plugins,
    )
    for check in checks:
        yield from check(found)
    if self_test:
        yield from _self_tests()


def _settings(found: dict[str, Any]) -> Iterator[Finding]:
    known = [f"TK_SERVING_{name.upper()}" for name in Settings.model_fields]
    unknown = sorted(name for name in os.environ if name.startswith("TK_SERVING_") and name not in known)
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        mend = f"did you mean {close[0]}? " if close else ""
        yield Finding("settings", FAILED, f"{name} is no setting", f"{mend}`tk-serving env` lists all settings")
    if not unknown:
        changed = [f"TK_SERVING_{name.upper()}" for name in sorted(settings.model_fields_set)]
        yield Finding("settings", OK, ", ".join(changed) or "all at their defaults")


def _requirements(found: dict[str, Any]) -> Iterator[Finding]:
    """The versions that the distribution declares: its own requirements, and the engines among its extras."""
    try:
        declared = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages", FAILED, f"{DISTRIBUTION} is no installed distribution, so no engine finds its flag",
            "pip install it instead of setting PYTHONPATH",
        )  # fmt: skip
        return
    always = [requirement for requirement in declared if requirement.marker is None]
    wrong = [(requirement, version) for requirement in always if (version := _unmet(requirement)) is not None]
    for requirement, version in wrong:
        detail = f"{requirement.name}: expected {requirement.specifier}, got {version or 'none'}"
        yield Finding("packages", FAILED, detail, f"pip install '{requirement}'")
    if not wrong:
        versions = {requirement.name: importlib.metadata.version(requirement.name) for requirement in always}
        yield Finding("packages", OK, ", ".join(f"{name} {version}" for name, version in versions.items()))
    tilelang = found["packages"]["tilelang"]
    if tilelang is not None and tilelang not in TESTED_TILELANG:
        tested = " and ".join(TESTED_TILELANG)
        yield Finding("TileLang", OK, f"{tilelang} is allowed but not tested; tested are {tested}")
    for requirement in declared:
        if requirement.marker is not None and requirement.name in (*PLUGINS, "transformers"):
            yield _engine(requirement)


def _engine(requirement: Requirement) -> Finding:
    name = requirement.name
    version = _unmet(requirement)
    if version is None:
        return Finding(name, OK, importlib.metadata.version(name))
    if not version:
        return Finding(name, SKIPPED, "not installed here")
    return Finding(
        name, FAILED, f"expected {requirement.specifier}, got {version}",
        f"pip install '{name}{requirement.specifier}', or a release of tk-serving that supports {version}",
    )  # fmt: skip


def _unmet(requirement: Requirement) -> str | None:
    """The installed version where it does not meet the requirement, empty where there is none; None if it does."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return None if requirement.specifier.contains(version, prereleases=True) else version


def _driver(found: dict[str, Any]) -> Iterator[Finding]:
    driver, built = environment.driver_cuda(), found["cuda"]["torch"]
    if built is None:
        if driver is None:
            yield Finding("driver", SKIPPED, "no NVIDIA driver and a CPU build of torch")
        else:
            yield Finding(
                "driver", FAILED, "an NVIDIA driver, but torch is a CPU build", "install the CUDA build of torch"
            )
        return
    if driver is None:
        yield Finding(
            "driver", FAILED, f"torch is built for CUDA {built}, but there is no NVIDIA driver",
            "install the driver on the host; start a container with --gpus all or the nvidia runtime",
        )  # fmt: skip
        return
    text = f"supports CUDA {driver[0]}.{driver[1]}, torch is built for {built}"
    if driver[0] < int(built.split(".")[0]):
        needed = {"13": "580", "12": "525"}.get(built.split(".")[0])
        mend = f"update the driver to {needed} or newer" if needed else "update the driver"
        yield Finding("driver", FAILED, text, f"{mend}, or install torch for CUDA {driver[0]}")
    else:
        yield Finding("driver", OK, text)


def _devices(found: dict[str, Any]) -> Iterator[Finding]:
    devices = found["cuda"]["devices"]
    if not devices:
        if found["cuda"]["torch"] is None:
            yield Finding("device", SKIPPED, "no NVIDIA GPU: CPU tensors run the torch references")
        else:
            yield Finding("device", FAILED, "no NVIDIA GPU is visible", "see nvidia-smi; check CUDA_VISIBLE_DEVICES")
        return
    for device in dict.fromkeys(devices):
        count = devices.count(device)
        text = f"{count} x {device}" if count > 1 else device
        if _capability(device) < MIN_CAPABILITY:
            needed = "compute capability 9.0 (Hopper) or higher is needed"
            mend = "calls run the references or the engine's code here; leave the flag off"
            yield Finding("device", FAILED, f"{text}: {needed}", mend)
        else:
            yield Finding("device", OK, text)


def _capability(device: str) -> tuple[int, int]:
    major, _, minor = device.split(", ")[2].partition(".")
    return int(major), int(minor)


def _toolkit(found: dict[str, Any]) -> Iterator[Finding]:
    version = found["cuda"]["nvcc"]
    if settings.jit == "forbid":
        yield Finding("CUDA toolkit", SKIPPED, "TK_SERVING_JIT=forbid: nothing is compiled here")
        return
    if version is None:
        detail = "no nvcc: only kernels that were built ahead of time can run"
        if settings.kernel_cache or not found["cuda"]["devices"]:
            yield Finding("CUDA toolkit", SKIPPED, detail)
        else:
            mend = "set CUDA_HOME, or set TK_SERVING_KERNEL_CACHE to the output of `tk-serving build`"
            yield Finding("CUDA toolkit", FAILED, detail, mend)
        return
    driver = environment.driver_cuda()
    release = tuple(int(part) for part in version.split(".")[:2])
    if driver is not None and release[0] > driver[0]:
        mend = f"use a CUDA {driver[0]} toolkit (CUDA_HOME), or update the driver"
        yield Finding("CUDA toolkit", FAILED, f"nvcc {version} is newer than the driver (CUDA {driver[0]})", mend)
    elif shutil.which("g++") is None:
        yield Finding("CUDA toolkit", FAILED, f"nvcc {version} needs g++", "install g++, or set TK_SERVING_JIT=forbid")
    else:
        yield Finding("CUDA toolkit", OK, f"nvcc {version}")


def _prebuilt(found: dict[str, Any]) -> Iterator[Finding]:
    folder = settings.kernel_cache
    if not folder:
        if settings.jit == "forbid":
            mend = "set TK_SERVING_KERNEL_CACHE to the output of `tk-serving build`"
            yield Finding("prebuilt kernels", FAILED, "TK_SERVING_JIT=forbid, and no cache is named", mend)
        else:
            detail = "TK_SERVING_KERNEL_CACHE is not set: kernels are compiled on first use"
            yield Finding("prebuilt kernels", SKIPPED, detail)
        return
    reason = cache.refusal()
    if reason:
        mend = f"correct what the message names, or `tk-serving build --out {folder}` with this installation"
        yield Finding("prebuilt kernels", FAILED, reason, mend)
        return
    manifest = cache.Prebuilt(pathlib.Path(folder)).manifest
    archs, models = manifest["archs"], ",".join(manifest["models"])
    text = f"{folder}: {len(manifest['kernels'])} kernels for {models} on {', '.join(archs)}, {manifest['date']}"
    capabilities = {_capability(device) for device in found["cuda"]["devices"]}
    missing = sorted({arch_of(c) for c in capabilities if c >= MIN_CAPABILITY} - set(archs))
    if missing:
        mend = f"tk-serving build --arch {','.join([*archs, *missing])} --model {models} --out DIR"
        yield Finding("prebuilt kernels", FAILED, f"{text}; none for {', '.join(missing)}", mend)
    else:
        yield Finding("prebuilt kernels", OK, text)


def _folders(found: dict[str, Any]) -> Iterator[Finding]:
    """Folders that this process writes to."""
    if settings.jit != "forbid":
        yield _folder("kernel folder", cache.usual(), "TK_SERVING_LOCAL_CACHE", cache.unsafe)
    if settings.state_dir:
        yield _folder("state folder", pathlib.Path(settings.state_dir), "TK_SERVING_STATE_DIR", lambda path: "")


def _folder(check: str, folder: pathlib.Path, variable: str, unsafe: Callable[[pathlib.Path], str]) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(
            check, FAILED, f"{folder}: {error.strerror}", f"set {variable} to a folder that you may write to"
        )
    reason = unsafe(folder)
    if reason:
        return Finding(check, FAILED, reason.split(";")[0], reason.split(";")[-1].strip())
    return Finding(check, OK, str(folder))


def _plugins(found: dict[str, Any]) -> Iterator[Finding]:
    for engine, (group, variable) in PLUGINS.items():
        check = f"{engine} plugin"
        if importlib.util.find_spec(engine) is None:
            yield Finding(check, SKIPPED, f"{engine} is not installed here")
            continue
        allowed = os.environ.get(variable)
        entry = next((e for e in importlib.metadata.entry_points(group=group) if e.name == "tilekernels"), None)
        if entry is None:
            mend = "pip install tk-serving into the environment of the engine; PYTHONPATH brings no entry points"
            yield Finding(check, FAILED, f"no entry point tilekernels in {group}", mend)
        elif allowed is not None and "tilekernels" not in [name.strip() for name in allowed.split(",")]:
            yield Finding(check, FAILED, f"{variable}={allowed} keeps it out", f"add tilekernels to {variable}")
        else:
            yield _loaded(check, entry)


def _loaded(check: str, entry: importlib.metadata.EntryPoint) -> Finding:
    try:
        entry.load()
    except Exception as error:
        reason = f"{entry.value}: {type(error).__name__}: {error}"
        return Finding(check, FAILED, reason, "pip install --force-reinstall --no-deps tk-serving")
    return Finding(check, OK, f"entry point tilekernels = {entry.value}")


def _self_tests() -> Iterator[Finding]:
    from tk_serving import selftest

    how, device = selftest.implementation()
    if not how:
        detail = "neither a GPU nor g++ with CUDA headers: CPU tensors run the references themselves"
        yield Finding("self-test", SKIPPED, detail)
        return
    for family in FAMILIES:
        outcome = selftest.run(family, how, device)
        check, text = f"self-test {family}", f"{', '.join(outcome.tested)} ({how}, {outcome.seconds:.1f} s)"
        if outcome.failure:
            yield Finding(check, FAILED, outcome.failure, _mend_of(outcome.tested[-1]))
        elif not outcome.tested:
            yield Finding(check, SKIPPED, "no kernel of this family is in the prebuilt cache")
        else:
            yield Finding(check, OK, text)


def _mend_of(operator: str) -> str:
    return f"TK_SERVING_DISABLE={operator} keeps it out of service; report it with `tk-serving env --json`"
