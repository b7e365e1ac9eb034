"""Routed experts with FP4 weights on FP8 tensor cores.

Activations are cast to FP8. Weights are multiplied as they are (:mod:`tk_serving.modeling.fp8_experts.w4a8`), or upcast
without a change of value; then the grouped FP8 matrix product is an argument, so that no serving engine is imported.
For GPUs that have FP8 but no FP4 matrix instructions (Hopper).
"""

from tk_serving.modeling.fp8_experts.chain import Product, routed_experts
from tk_serving.modeling.fp8_experts.policy import MODES, Policy, alignment
from tk_serving.modeling.fp8_experts.weights import Fp4Weights, Fp8Weights, Layer, Layers

__all__ = ["MODES", "Fp4Weights", "Fp8Weights", "Layer", "Layers", "Policy", "Product", "alignment", "routed_experts"]
