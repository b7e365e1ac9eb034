"""Which sites the model classes of vLLM use.

Names are those of :mod:`tk_serving_vllm.sites`. V3 is built from the classes of V2.
"""

from __future__ import annotations

ROUTED = ("routing", "routed-experts", "routed-experts-triton", "routed-experts-deepgemm")
DENSE = ("swiglu", "swiglu-quant")

MODELS: dict[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": ROUTED + DENSE,
    "DeepseekV3ForCausalLM": ROUTED + DENSE,
}
