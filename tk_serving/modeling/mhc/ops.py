"""The mHC operators under the path that they have in the 1.0.0 line of tile-kernels; P34-P40 are differentiable."""

from tk_serving.mhc.differentiable import (
    expand_to_mhc,
    mhc_head_compute_mix,
    mhc_post,
    mhc_pre_apply_mix,
    mhc_pre_norm_fn,
    mhc_pre_split_mixes,
    sinkhorn_normalize,
)
from tk_serving.mhc.mhc_multilayer_recompute import mhc_multilayer_recompute
from tk_serving.mhc.mhc_post import mhc_post as mhc_post_fwd
from tk_serving.mhc.mhc_post_bwd import mhc_post_bwd
from tk_serving.mhc.mhc_pre_big_fuse import mhc_pre_big_fuse

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
