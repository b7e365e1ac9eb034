"""One file for each seam of vLLM that operators of tk-serving take over.

Importing this package imports neither vLLM nor TileLang; a seam imports what it needs when it is patched.
"""

from tk_serving_patches import Site
from tk_serving_vllm.sites import (
    dense_products,
    engram,
    expert_blocks,
    fp4_experts,
    hyper_connections,
    inverse_rotary,
    linear_input,
    routed_experts,
    routed_experts_deepgemm,
    routed_experts_triton,
    routing,
    shared_experts,
    swiglu,
)

SITES: tuple[Site, ...] = (
    *hyper_connections.SITES,
    *engram.SITES,
    *linear_input.SITES,
    *inverse_rotary.SITES,
    *dense_products.SITES,
    *routing.SITES,
    *expert_blocks.SITES,
    *routed_experts.SITES,
    *routed_experts_triton.SITES,
    *routed_experts_deepgemm.SITES,
    *fp4_experts.SITES,
    *swiglu.SITES,
    *shared_experts.SITES,
)
"""Every site, in the order of a layer's computation. Sites with one name are alternatives for different platforms."""
