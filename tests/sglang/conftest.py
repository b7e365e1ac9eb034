"""SGLang on a machine without a GPU, before anything imports it; other environments have no SGLang and no change."""

import importlib.metadata
import os

import pytest
import torch

# By its distribution: as a module, this folder itself would be found where SGLang is not installed.
HAVE_SGLANG = any(found.name == "sglang" for found in importlib.metadata.distributions())
if HAVE_SGLANG and not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling SGLang's own top-k takes half a minute


@pytest.fixture(scope="session")
def sglang_plugins():
    """SGLang with its plugins loaded, as in every process that it starts."""
    pytest.importorskip("sglang.srt")
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def published(sglang_plugins):
    """Publish a configuration as a process of the server would; afterwards nothing is patched."""
    from sglang.srt import server_args
    from sglang.srt.runtime_context import publish

    from tk_serving_sglang import activate

    def start(role="scheduler", **changes):
        arguments = server_args.ServerArgs(
            **{"model_path": "dummy", "device": "cuda" if torch.cuda.is_available() else "cpu", **changes}
        )
        arguments.resolve_once()
        publish(arguments, role=role)
        return arguments

    yield start
    activate.ledger.revert()
    activate.process.revert()
