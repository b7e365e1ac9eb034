"""Which sites the model classes of vLLM use.

Names are those of :mod:`tk_serving_vllm.sites`. V3 is built from the classes of V2.
"""

from __future__ import annotations

ROUTED = ("routing", "expert-blocks", "routed-experts", "routed-experts-triton", "routed-experts-deepgemm")
DENSE = ("linear-input", "group-cast", "fp8-linear", "swiglu", "swiglu-quant")
HYPER_CONNECTIONS = ("mhc-pre-broadcast", "mhc-pre", "mhc-post-pre", "mhc-post", "mhc-head", "mhc-warm-up")
DELAYED = ("mhc-pre-delayed", "mhc-post-pre-delayed", "mhc-post", "engram-gate")
BIASED = (
    "routing",
    "routing-biased",
    "expert-blocks",
    "routed-experts",
    "routed-experts-marlin",
    "routed-experts-deepgemm",
    "fp4-experts",
)

MODELS: dict[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": ROUTED + DENSE,
    "DeepseekV3ForCausalLM": ROUTED + DENSE,
    "DeepseekV32ForCausalLM": ROUTED + DENSE,
    "DeepseekV41ForCausalLM": (
        *DELAYED,
        "routing-biased",
        "expert-blocks",
        "routed-experts-marlin",
        "swiglu-clamp",
        "shared-experts",
    ),
    "DeepseekV4ForCausalLM": (
        *HYPER_CONNECTIONS,
        "linear-input",
        "group-cast",
        "fp8-linear",
        "inverse-rotary",
        "output-projection",
        *BIASED,
        "swiglu-clamp",
        "shared-experts",
    ),
}
