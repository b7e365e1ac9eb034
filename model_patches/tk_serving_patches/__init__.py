"""Where an operator goes in a model: tables of call sites, and the one engine that applies and reverts them."""

import importlib
from typing import Any

from tk_serving_patches.engine import Function, Ledger, Override, PatchError, Row, Site, fingerprint

_TRANSFORMERS = (
    "PatchHandle",
    "apply",
    "apply_tilekernels_to_deepseek_v2",
    "apply_tilekernels_to_deepseek_v3",
    "apply_tilekernels_to_deepseek_v4",
    "apply_tilekernels_to_deepseek_v32",
    "register_experts",
    "unregister_experts",
)

__all__ = ["Function", "Ledger", "Override", "PatchError", "Row", "Site", "fingerprint", *_TRANSFORMERS]


def __getattr__(name: str) -> Any:
    # On first use: the serving engines need none of it.
    if name in _TRANSFORMERS:
        return getattr(importlib.import_module("tk_serving_patches.transformers"), name)
    raise AttributeError(f"module 'tk_serving_patches' has no attribute {name!r}")
