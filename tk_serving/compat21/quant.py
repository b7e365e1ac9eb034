"""SwiGLU of rows that are grouped by expert, under the names and with the arguments of the 2.1 line."""

from torch import Tensor

from tk_serving import quant
from tk_serving.operator import Quantized


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
) -> Quantized:
    """``quant.swiglu_forward_and_per_token_cast_grouped``."""
    rows = (psum_num_tokens_per_expert, topk_weights, routed_scaling_factor)
    layout = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return quant.swiglu_forward_and_per_token_cast_grouped(
        x, fmt, num_per_channels, *rows, *layout, clamp_value, clamped_count
    )


def swiglu_backward_and_per_token_cast(
    x: Tensor,
    grad_out: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    round_sf: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[Quantized, Tensor | None, Tensor | None]:
    """``quant.swiglu_backward_and_per_token_cast_grouped``."""
    rows = (psum_num_tokens_per_expert, topk_weights, routed_scaling_factor)
    return quant.swiglu_backward_and_per_token_cast_grouped(
        x, grad_out, fmt, num_per_channels, *rows, round_sf, clamp_value, do_recompute
    )
