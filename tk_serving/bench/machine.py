"""What a benchmark needs from the machine."""

from __future__ import annotations

import importlib.util

from tk_serving.dispatch import MIN_CAPABILITY


def missing() -> list[str]:
    """What is missing for measurements here, each with the remedy; empty if nothing is."""
    import torch

    found = []
    if torch.version.cuda is None:
        found.append(f"a CUDA build of torch: {torch.__version__} is a CPU build")
    elif not torch.cuda.is_available():
        found.append("an NVIDIA GPU with its driver: torch finds none (see nvidia-smi)")
    else:
        capability = torch.cuda.get_device_capability()
        if capability < MIN_CAPABILITY:
            name = torch.cuda.get_device_name()
            found.append("compute capability 9.0 or higher: {} has {}.{}".format(name, *capability))
    if importlib.util.find_spec("tilelang") is None:
        found.append("TileLang: pip install 'tilelang>=0.1.12,<0.2'")
    return found
