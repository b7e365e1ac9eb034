"""Manifold hyper-connections: several residual streams, mixed before and after every sublayer.

P34-P40 of operators.md are differentiable here; the suffix ``_fwd`` names the operator that records nothing.
"""

from tk_serving.operator import load_family

globals().update(load_family(__name__))

from tk_serving.mhc.differentiable import *  # noqa: E402
