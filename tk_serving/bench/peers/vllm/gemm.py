"""Products of vLLM."""

from __future__ import annotations

from torch import Tensor

from tk_serving.bench.peers import PeerCall, deepgemm, need


def skinny_gemm_fp8(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], constant_weight: bool = False) -> PeerCall:
    """DeepGEMM, as vLLM's linear layers and V4's output projection call it: with early launches."""
    need("deep_gemm", "vllm.third_party.deep_gemm")  # without it vLLM would say so in the timed call only
    return deepgemm.products(need("vllm.utils.deep_gemm"), x, weight, is_deep_gemm_e8m0_used=False)
