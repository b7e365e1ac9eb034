"""One file for each seam of SGLang that operators of tk-serving take over.

Importing this package imports neither SGLang nor TileLang; a seam imports what it needs when it is patched.
"""

from tk_serving_patches import Site
from tk_serving_sglang.sites import (
    engram,
    fp4_experts,
    hyper_connections,
    quant,
    routed_experts,
    routed_experts_deepgemm,
    routed_experts_triton,
    routing,
    swiglu,
)

SITES: tuple[Site, ...] = (
    *engram.SITES,
    *hyper_connections.SITES,
    *quant.SITES,
    *routing.SITES,
    *routed_experts.SITES,
    *routed_experts_triton.SITES,
    *routed_experts_deepgemm.SITES,
    *fp4_experts.SITES,
    *swiglu.SITES,
)
"""Every site, in the order of a layer's computation. Sites with one name are alternatives for different platforms."""
