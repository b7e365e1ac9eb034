"""The flag ``--kernel-backend``: from the command line, or ``Engine(kernel_backend=...)``, to every scheduler.

SGLang lets a plugin replace the class of its arguments. The choice is a field of it, which SGLang sends to every
process and shows at ``/server_info``. A scheduler publishes its configuration before it builds anything; that is when
the call sites are patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tk_serving.config import settings
from tk_serving_patches import Function, Ledger, Site, server

ledger = Ledger()
"""The changes that add the flag; they are there whether or not it is used."""

_TARGET = "sglang.srt.server_args.ServerArgs"


def install() -> None:
    """Add the flag to SGLang's arguments, and the check for it to the publication of the configuration.

    SGLang replaces the class when all plugins have registered their hooks.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tk_serving_sglang.args import ServerArgs

    if all(hook is not ServerArgs for _, hook, _ in HookRegistry._hooks.get(_TARGET, ())):
        HookRegistry.register(_TARGET, ServerArgs, HookType.REPLACE)
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:  # an attribute of the class, which SGLang does not rebind
        engine.Engine.server_args_class = ServerArgs
    watch_publication()


def watch_publication() -> None:
    """Patch the call sites of this process when it publishes a configuration that says so."""
    ledger.apply(_PUBLISH)


def _publish(original: Callable[..., Any]) -> Callable[..., Any]:
    def publish(server_args: Any, *, role: str, **kwargs: Any) -> Any:
        context = original(server_args, role=role, **kwargs)
        choice = getattr(server_args, "kernel_backend", None)
        if choice is None and settings.kernel_backend == "tilekernels":
            server.refuse(["the arguments were made before SGLang's plugins were loaded: call load_plugins() first"])
        if choice == "tilekernels" or "tk_serving_sglang.activate" in sys.modules:
            from tk_serving_sglang import activate

            activate.follow(server_args, role)
        return context

    return publish


_PUBLISH = Site(
    name="publish",
    operators=(),
    patches=(Function("sglang.srt.runtime_context:publish", _publish),),
    why="A plugin is loaded without the configuration; publication is the first that a scheduler does with it.",
    how="Publishes as before, then patches the call sites or restores them.",
    until="SGLang hands its configuration to plugins.",
)
