"""Operators of tk-serving in the DeepSeek classes of Hugging Face transformers, and back.

    from tk_serving_patches import apply

    handle = apply(model)
    print(handle.report())
    ...
    handle.revert()

Importing this package does not import transformers.
"""

from tk_serving_patches.transformers.api import (
    apply,
    apply_tilekernels_to_deepseek_v2,
    apply_tilekernels_to_deepseek_v3,
    apply_tilekernels_to_deepseek_v4,
    apply_tilekernels_to_deepseek_v32,
    register_experts,
    unregister_experts,
)
from tk_serving_patches.transformers.handle import PatchHandle, Report, SiteReport

__all__ = [
    "PatchHandle",
    "Report",
    "SiteReport",
    "apply",
    "apply_tilekernels_to_deepseek_v2",
    "apply_tilekernels_to_deepseek_v3",
    "apply_tilekernels_to_deepseek_v4",
    "apply_tilekernels_to_deepseek_v32",
    "register_experts",
    "unregister_experts",
]
