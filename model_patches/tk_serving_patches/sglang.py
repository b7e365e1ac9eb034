"""Which sites the model classes of SGLang use.

Names are those of :mod:`tk_serving_sglang.sites`. V3 and V3.2 are built from the classes of V2; the checkpoints of V4.1
have V4's class.
"""

from __future__ import annotations

EXPERTS = ("routed-experts", "routed-experts-triton", "routed-experts-scatter", "routed-experts-reduce")
DENSE = ("quant", "swiglu")
HYPER_CONNECTIONS = (
    "mhc-pre",
    "mhc-post",
    "mhc-post-pre",
    "mhc-sinkhorn",
    "mhc-combine",
    "mhc-broadcast",
    "mhc-head",
)
V3 = ("routing", *EXPERTS, *DENSE)
V4 = (
    "routing-scores",
    "routing-hash",
    *EXPERTS,
    "fp4-experts",
    *DENSE,
    "swiglu-clamp",
    "swiglu-quant",
    *HYPER_CONNECTIONS,
)
ENGRAM = ("engram-hash", "engram-gate")

MODELS: dict[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": ("routing-grouped", *EXPERTS, *DENSE),
    "DeepseekV3ForCausalLM": V3,
    "DeepseekV32ForCausalLM": V3,
    "DeepseekV4ForCausalLM": V4 + ENGRAM,
}
