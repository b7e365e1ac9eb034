"""DeepGEMM: its casts in torch, the pre-norm GEMM of the mHC layers, and products of FP8 blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.peers import PeerCall, covers, need, nothing_else


def per_token_cast(
    x: Any,
    fmt: str,
    num_per_channels: int,
    x_block_size: Any = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    **rest: Any,
) -> PeerCall:
    """``per_token_cast_to_fp8``: several torch operators; row-major scales."""
    covers(isinstance(x, Tensor) and fmt == "e4m3", "plain values to e4m3")
    nothing_else(rest)
    cast = _utils().per_token_cast_to_fp8
    return PeerCall(lambda: cast(x, round_sf, num_per_channels, use_packed_ue8m0))


def per_block_cast(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    **rest: Any,
) -> PeerCall:
    """``per_block_cast_to_fp8``: several torch operators."""
    covers(fmt == "e4m3" and block_size[0] == block_size[1] and not use_packed_ue8m0, "square blocks to e4m3")
    nothing_else(rest)
    cast = _utils().per_block_cast_to_fp8
    return PeerCall(lambda: cast(x, round_sf, block_size[0]))


def per_channel_cast(x: Any, fmt: str, num_per_tokens: int, round_sf: bool = False, **rest: Any) -> PeerCall:
    """``per_channel_cast_to_fp8``: several torch operators."""
    covers(isinstance(x, Tensor) and x.shape[0] % num_per_tokens == 0, "plain values in whole blocks of rows")
    nothing_else(rest)
    cast = _utils().per_channel_cast_to_fp8
    return PeerCall(lambda: cast(x, round_sf, num_per_tokens))


def per_token_cast_back(
    x: tuple[Tensor, Tensor], fmt: str, num_per_channels: int, x_special_fmt: str | None = None
) -> PeerCall:
    """``cast_back_from_fp8`` and ``cast_back_from_fp4``: several torch operators."""
    data, sf = x
    covers(x_special_fmt is None and sf.dtype == torch.float32 and fmt == "fp32", "f32 scales, to f32")
    utils = _utils()
    back = utils.cast_back_from_fp8 if data.dtype == torch.float8_e4m3fn else utils.cast_back_from_fp4
    return PeerCall(lambda: back(data, sf, num_per_channels))


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> PeerCall:
    """``tf32_hc_prenorm_gemm``: the product and the square sums, split over K."""
    covers(mhc_norm_weight is None, "calls without a norm weight")
    gemm = need("deep_gemm", "vllm.third_party.deep_gemm").tf32_hc_prenorm_gemm
    x = residual.reshape(-1, residual.shape[-2] * residual.shape[-1])
    product = torch.empty(n_splits, x.shape[0], mhc_fn.shape[0], device=x.device)
    squares = torch.empty(n_splits, x.shape[0], device=x.device)

    def result(_: Any) -> Tensor:
        mean = squares.sum(0) / x.shape[1]
        return (product.sum(0) * (mean + mhc_norm_eps).rsqrt().unsqueeze(1)).view(*residual.shape[:-2], -1)

    return PeerCall(
        lambda: gemm(x, mhc_fn, product, squares, n_splits),
        result,
        "leaves the sum over the splits and the scaling to the next kernel",
    )


def skinny_gemm_fp8(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], constant_weight: bool = False) -> PeerCall:
    """``fp8_gemm_nt``, and ``fp8_einsum`` for groups; scales as these kernels read them."""
    return products(need("deep_gemm", "vllm.third_party.deep_gemm"), x, weight, disable_ue8m0_cast=True)


def products(engine: Any, x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], **options: Any) -> PeerCall:
    """The call of DeepGEMM's functions in a module that has them.

    Args:
        engine: the module.
        x: rows and scales, as of the operator.
        weight: weights and scales, as of the operator.
        options: further arguments of ``fp8_gemm_nt``.
    """
    data, sf = x
    covers(len(data) > 0, "calls with rows")
    scales = in_columns(sf)
    out = torch.empty(*data.shape[:-1], weight[0].shape[-2], dtype=torch.bfloat16, device=data.device)
    if data.dim() == 2:
        return PeerCall(lambda: engine.fp8_gemm_nt((data, scales), weight, out, **options), lambda _: out)
    rows = data.transpose(0, 1).contiguous().transpose(0, 1), scales  # group by group, as vLLM's kernel leaves them
    return PeerCall(lambda: engine.fp8_einsum("bhr,hdr->bhd", rows, weight, out, recipe=(1, 128, 128)), lambda _: out)


def in_columns(sf: Tensor) -> Tensor:
    """Scales [M, ..., K / 128] with the rows next to each other, every column on a 16-byte boundary: others would be
    transposed in a launch before the product."""
    rows = sf.shape[0]
    columns = sf.new_zeros(*sf.shape[1:], -(-rows // 4) * 4)
    columns[..., :rows] = sf.movedim(0, -1)
    return columns.movedim(-1, 0)[:rows]


def _utils() -> Any:
    return need("deep_gemm.utils.math", "vllm.third_party.deep_gemm.utils.math")
