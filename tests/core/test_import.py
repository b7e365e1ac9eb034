"""Importing the package must cost a server nothing."""

import subprocess
import sys

PROBE = """
import sys
import tk_serving
from tk_serving.operator import operators
assert operators()
loaded = [name for name in ("tilelang", "tvm", "vllm", "sglang", "transformers", "triton") if name in sys.modules]
assert not loaded, loaded
import torch
assert not torch.cuda.is_initialized()
"""


def test_import_loads_no_compiler_no_engine_and_no_cuda_context():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_unknown_attribute_is_named():
    import pytest

    import tk_serving

    with pytest.raises(AttributeError, match="no attribute 'quantum'"):
        tk_serving.quantum  # noqa: B018
