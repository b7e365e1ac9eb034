"""The flag ``--kernel-backend``: from the command line, or ``additional_config``, to every worker.

vLLM offers general plugins no hook for options, so three methods of ``EngineArgs`` are wrapped. The choice travels in
``VllmConfig.additional_config``, which vLLM sends to every process on every host and which is part of the key of its
compile caches; the versions of package and kernels travel with it, because the bodies of operators are not traced.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from tk_serving.config import settings
from tk_serving_patches import Function, Ledger, Site

CHOICES = ("auto", "tilekernels")
KEY = "kernel_backend"

ledger = Ledger()
"""The changes that add the flag; they are there whether or not it is used."""


def install() -> None:
    """Add the flag to vLLM's arguments and the check for it to vLLM's workers."""
    child = multiprocessing.parent_process() is not None
    # The arguments are parsed in the main process and in API-server processes, which have imported the module.
    if not child or "vllm.engine.arg_utils" in sys.modules:
        ledger.apply(_ARGUMENTS)
    # Only processes that run the model import the worker; the main process of an offline engine does so later.
    if child or "vllm.v1.worker.worker_base" in sys.modules:
        install_worker_hook()


def install_worker_hook() -> None:
    """Make vLLM's workers look for the flag in their configuration before they load the model."""
    ledger.apply(_WORKER)


def _add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        group = parser.add_argument_group(title="tk-serving", description="TileLang kernels for DeepSeek-style models.")
        group.add_argument(
            "--kernel-backend",
            choices=CHOICES,
            default=None,
            help="'tilekernels' replaces the operators around the matrix products by those of tk-serving; "
            "'auto' leaves vLLM as it is (default: TK_SERVING_KERNEL_BACKEND, else auto)",
        )
        return parser

    return add_cli_args


def _from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_cli_args(cls: type, args: Any) -> Any:
        engine_args = original(cls, args)
        choice = getattr(args, KEY, None)
        if choice is not None:
            given = engine_args.additional_config.get(KEY, choice)
            if given != choice:
                raise ValueError(
                    f"--kernel-backend {choice} contradicts kernel_backend {given!r} in --additional-config"
                )
            engine_args.additional_config = {**engine_args.additional_config, KEY: choice}
        return engine_args

    return from_cli_args


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if backend(self.additional_config) != "tilekernels":
            return original(self, *args, **kwargs)
        from tk_serving_vllm import activate

        activate.prepare(self)
        config = original(self, *args, **kwargs)
        activate.complete(config)
        install_worker_hook()
        return config

    return create_engine_config


def backend(additional_config: dict[str, Any]) -> str:
    """The chosen backend.

    Raises:
        ValueError: an unknown choice.
    """
    choice = additional_config.get(KEY, settings.kernel_backend)
    if choice not in CHOICES:
        raise ValueError(f"kernel_backend: expected one of {', '.join(CHOICES)}, got {choice!r}")
    return choice


def _init_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        from tk_serving_vllm import activate

        activate.follow(self.vllm_config)
        return original(self, *args, **kwargs)

    return init_device


_ARGUMENTS = Site(
    name="flag",
    operators=(),
    patches=(
        Function("vllm.engine.arg_utils:EngineArgs.add_cli_args", _add_cli_args),
        Function("vllm.engine.arg_utils:EngineArgs.from_cli_args", _from_cli_args),
        Function("vllm.engine.arg_utils:EngineArgs.create_engine_config", _create_engine_config),
    ),
    why="Users choose the backend as they choose any other option of vLLM.",
    how="Adds one option; puts its value into additional_config; refuses at start what cannot be honoured.",
    until="vLLM lets a general plugin declare options.",
)

_WORKER = Site(
    name="worker",
    operators=(),
    patches=(Function("vllm.v1.worker.worker_base:WorkerWrapperBase.init_device", _init_device),),
    why="A plugin is loaded without the configuration; the worker has it, and has not yet loaded the model.",
    how="Reads additional_config, patches the call sites or restores them, then initialises the device as before.",
    until="vLLM hands its configuration to general plugins.",
)
