"""Hyper-connections for models: differentiable functions, and modules that hold their parameters."""

from tk_serving.modeling.mhc import ops
from tk_serving.modeling.mhc.functions import expand_from_embedding, mhc_head, mhc_pre
from tk_serving.modeling.mhc.modules import HyperConnection, HyperHead

__all__ = ["HyperConnection", "HyperHead", "expand_from_embedding", "mhc_head", "mhc_pre", "ops"]
