"""The mHC operators under the path that they have in the 1.0.0 line of tile-kernels; P34-P40 are differentiable."""

from tk_serving.mhc import (
    expand_to_mhc,
    mhc_head_compute_mix,
    mhc_multilayer_recompute,
    mhc_post,
    mhc_post_bwd,
    mhc_post_fwd,
    mhc_pre_apply_mix,
    mhc_pre_big_fuse,
    mhc_pre_norm_fn,
    mhc_pre_split_mixes,
    sinkhorn_normalize,
)

__all__ = [
    "expand_to_mhc",
    "mhc_head_compute_mix",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre_apply_mix",
    "mhc_pre_big_fuse",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
]
