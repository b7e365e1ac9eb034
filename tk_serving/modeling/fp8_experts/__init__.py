"""Routed experts with FP4 weights on FP8 tensor cores.

Weights are upcast without a change of value, activations are cast to FP8. For GPUs that have FP8 but no FP4 matrix
instructions (Hopper). No serving engine is imported: the grouped FP8 matrix product is an argument.
"""

from tk_serving.modeling.fp8_experts.chain import Product, routed_experts
from tk_serving.modeling.fp8_experts.policy import MODES, Policy, alignment
from tk_serving.modeling.fp8_experts.weights import Fp4Weights, Fp8Weights, Layer, Layers

__all__ = ["MODES", "Fp4Weights", "Fp8Weights", "Layer", "Layers", "Policy", "Product", "alignment", "routed_experts"]
