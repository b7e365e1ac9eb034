"""A serving engine end to end, with the backend and without, on the layer shapes of real models.

Two engine processes share one GPU and take turns: prefill, then decode at several batch sizes, each phase stock, ours,
ours, stock, and so on. Weights are random but realistic, and the same in both; their outputs are compared.
"""

from tk_serving.bench.e2e.alternate import EngineError, Options, run, validate
from tk_serving.bench.e2e.models import MODELS

__all__ = ["MODELS", "EngineError", "Options", "run", "validate"]
