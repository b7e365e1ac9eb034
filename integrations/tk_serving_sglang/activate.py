"""From the flag to patched call sites: checks at start, activation in the schedulers, and proof that it happened."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import tk_serving
from tk_serving import dispatch, metrics
from tk_serving.config import settings
from tk_serving_patches import Function, Ledger, Site, server, warm
from tk_serving_patches.server import refuse
from tk_serving_patches.sglang import MODELS
from tk_serving_sglang import report
from tk_serving_sglang.table import measured

TESTED = "0.5.23"
"""The tested release of SGLang: no other is accepted."""

KEY = "tk_serving"
"""Under this name schedulers report themselves, in their handshake and in ``/server_info``."""

log = logging.getLogger(__name__)
ledger = Ledger()
"""The call sites of the running model."""

process = Ledger()
"""The changes with which processes report to each other; only where the flag is used."""


def prepare(server_args: Any) -> None:
    """In the process that starts the engine, when the arguments are resolved: refuse what cannot be honoured.

    Raises:
        RuntimeError: the flag cannot be honoured; the message has every reason.
    """
    refuse(problems(server_args))
    server.check_model(_architecture(server_args), MODELS)
    server.share_state()
    process.apply(_CONFIRMATION)


def follow(server_args: Any, role: str) -> None:
    """When a process publishes its configuration: make what is patched here agree with it.

    Raises:
        RuntimeError: the flag cannot be honoured here, or no call site of the model could be patched.
    """
    chosen = getattr(server_args, "kernel_backend", "auto") == "tilekernels"
    if chosen and settings.state_dir:
        report.expose(settings.state_dir)
    if role != "scheduler":
        return
    ledger.revert()
    measured.forget()
    if not chosen:
        return
    from tk_serving_sglang.sites import SITES

    refuse(problems(server_args))
    architecture = _architecture(server_args)
    server.check_model(architecture, MODELS)
    warm.start()
    _choose(server_args)
    server.apply_all(ledger, SITES, architecture, MODELS[architecture], measured.verdict)
    process.apply(_SCHEDULER)
    if settings.state_dir:
        metrics.publish(settings.state_dir, functools.partial(server.as_dicts, ledger))


def problems(server_args: Any) -> list[str]:
    """Every reason why the flag cannot be honoured with these arguments in this environment."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from tk_serving_sglang.sites import SITES

    chosen = resolving_view(server_args)
    found = []
    version = _version()
    if version != TESTED:
        found.append(f"sglang {version} is installed; tested is {TESTED}")
    device = str(chosen.device).split(":", 1)[0]
    if device not in ("cpu", "cuda"):
        found.append(f"the device is {device}; tested are cpu and cuda")
    if device == "cuda":
        import torch

        if torch.version.hip is not None:
            found.append("the GPU is an AMD one")
        elif torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
            found.append("compute capability {}.{} is below 9.0".format(*torch.cuda.get_device_capability()))
    if chosen.enable_torch_compile:
        found.append("--enable-torch-compile switches SGLang's operators to torch code, and would trace ours")
    if chosen.enable_nvidia_megakernel:
        found.append("--enable-nvidia-megakernel runs whole layers, with no call of single operators")
    if chosen.encoder_only:
        found.append("--encoder-only runs no layers of a language model")
    return found + server.unknown_names(SITES)


def confirm(infos: Sequence[dict[str, Any]]) -> None:
    """In the process that started the schedulers: did every one of them report patched call sites.

    A data-parallel controller answers for its schedulers without their words; what they publish is asked instead.

    Raises:
        RuntimeError: a scheduler runs SGLang's own kernels although the flag was given.
    """
    silent = [i for i, info in enumerate(infos) if "status" in info and KEY not in info]
    if silent:
        refuse([f"scheduler {i} reports no call sites: the plugin did not run there" for i in silent])
    if not any(KEY in info for info in infos) and not any(s["sites"] for s in metrics.states(settings.state_dir)):
        refuse(["no scheduler reports call sites: the plugin did not run there"])


def _config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args).hf_config


def _architecture(server_args: Any) -> str:
    return _config(server_args).architectures[0]


def _choose(server_args: Any) -> None:
    """On a GPU, use the measurements of models with these sizes."""
    from sglang.srt.utils import is_cuda

    if is_cuda():
        config = _config(server_args)
        measured.choose(config.hidden_size, getattr(config, "n_routed_experts", 0))


def _version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def warm_up() -> None:
    """Compile or load the kernels of the calls that SGLang's own warm-up made, for other numbers of tokens."""
    import torch
    from sglang.srt.runtime_context import get_device, get_schedule

    if not torch.cuda.is_available() or str(get_device().device).split(":", 1)[0] != "cuda":
        return
    most = get_schedule().chunked_prefill_size
    started = time.perf_counter()
    found = warm.run(
        warm.counts(most if most and most > 0 else 8192), torch.device("cuda", torch.cuda.current_device())
    )
    log.info("%d kernels of tk-serving are ready after %.1f s", found, time.perf_counter() - started)


def _get_init_info(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_init_info(self: Any) -> dict[str, Any]:
        foreign = ledger.foreign()
        if foreign:
            refuse([f"{target} was replaced by other code while the model was loaded" for target in foreign])
        warm_up()
        log.info("tk-serving %s in this scheduler:\n%s", tk_serving.__version__, server.table(ledger.rows()))
        return {**original(self), KEY: server.as_dicts(ledger)}

    return get_init_info


def _get_internal_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_internal_state(self: Any, recv_req: Any) -> Any:
        output = original(self, recv_req)
        output.internal_state[KEY] = {
            "version": tk_serving.__version__,
            "kernels": server.kernel_uuid(),
            "sites": server.as_dicts(ledger),
            "calls": dispatch.counters(),
        }
        return output

    return get_internal_state


def _set_startup_time(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_startup_time(tokenizer_manager: Any, scheduler_init_result: Any, startup_tic: float) -> None:
        from sglang.srt.runtime_context import get_exec

        if get_exec().kernel.kernel_backend == "tilekernels":
            confirm(scheduler_init_result.scheduler_infos)
        original(tokenizer_manager, scheduler_init_result, startup_tic)

    return set_startup_time


_SCHEDULER = Site(
    name="scheduler",
    operators=(),
    patches=(
        Function("sglang.srt.managers.scheduler:Scheduler.get_init_info", _get_init_info),
        Function("sglang.srt.managers.scheduler:Scheduler.get_internal_state", _get_internal_state),
    ),
    why="SGLang goes on when a plugin fails; a scheduler that says nothing must be told from one that is patched.",
    how="Adds the rows of the report to the handshake, and with the counters to /server_info; logs them.",
    until="SGLang lets a plugin fail, and has a place for its state.",
)

_CONFIRMATION = Site(
    name="confirmation",
    operators=(),
    patches=(Function("sglang.srt.entrypoints.engine:Engine._set_startup_time", _set_startup_time),),
    why="See scheduler; here the main process reads the handshakes before the server is ready.",
    how="Raises if a scheduler reported no call sites.",
    until="As scheduler.",
)
