"""Manifold-constrained hyper-connections of V4: mixes, collapse, expansion and the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_serving import mhc
from tk_serving.modeling import mhc as layers
from tk_serving_patches.transformers._calls import Seam, refusal, verdict

PRE = Seam(
    "mhc-pre", ("mhc_pre_big_fuse", "mhc_pre_norm_fn", "mhc_pre_split_mixes", "sinkhorn_normalize", "mhc_pre_apply_mix")
)
POST = Seam("mhc-post", ("mhc_post",))
HEAD = Seam("mhc-head", ("mhc_head_fused", "mhc_pre_norm_fn", "mhc_head_compute_mix", "mhc_pre_apply_mix"))


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@verdict
def _pre_refusal(device: torch.device, dtype: torch.dtype, streams: int, size: int, training: bool) -> str | None:
    residual, fn = _empty(1, streams, size, dtype=dtype), _empty(streams * (2 + streams), streams * size)
    if training:
        return refusal(mhc.mhc_pre_norm_fn, device, residual, fn, None, 1e-6)
    options = (1e-6, 1e-6, 1e-6, 2.0, 20)
    return refusal(mhc.mhc_pre_big_fuse, device, residual, fn, _empty(3), _empty(len(fn)), *options)  # type: ignore[arg-type]


@verdict
def _post_refusal(device: torch.device, dtype: torch.dtype, streams: int, size: int) -> str | None:
    x, residual = _empty(1, size, dtype=dtype), _empty(1, streams, size, dtype=dtype)
    return refusal(mhc.mhc_post, device, x, residual, _empty(1, streams, 1), _empty(1, streams, streams))


@verdict
def _head_refusal(device: torch.device, dtype: torch.dtype, streams: int, size: int, training: bool) -> str | None:
    residual, fn = _empty(1, streams, size, dtype=dtype), _empty(streams, streams * size)
    if training:
        return refusal(mhc.mhc_pre_norm_fn, device, residual, fn, None, 1e-6)
    return refusal(mhc.mhc_head_fused, device, residual, fn, _empty(1), _empty(streams), 1e-6, 1e-6)  # type: ignore[arg-type]


def pre(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``DeepseekV4HyperConnection``: the mixes, and the streams collapsed into the input of a sublayer."""

    def forward(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        streams, size = hidden_streams.shape[-2:]
        reason = _pre_refusal(hidden_streams.device, hidden_streams.dtype, streams, size, torch.is_grad_enabled())
        if reason is not None:
            PRE.leave(reason)
            return original(self, hidden_streams)
        collapsed, (post, comb) = layers.mhc_pre(
            hidden_streams,
            self.fn.float(),
            self.scale.float(),
            self.base.float(),
            norm_eps=self.input_norm.eps,
            mhc_mult=self.hc_mult,
            post_mult_value=2.0,
            pre_eps=self.hc_eps,
            sinkhorn_eps=self.hc_eps,
            sinkhorn_repeat=self.hc_sinkhorn_iters,
        )
        return post.squeeze(-1), comb, collapsed

    return forward


def layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``DeepseekV4DecoderLayer``: the output of a sublayer spread over the mixed streams."""

    def forward(self: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        reason = _post_refusal(hidden_states.device, hidden_states.dtype, *hidden_states.shape[-2:])
        if reason is not None:
            POST.leave(reason)
            return original(self, hidden_states, input_ids=input_ids, **kwargs)
        post, comb, collapsed = self.attn_hc(hidden_states)
        output, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
        hidden_states = _spread(output, hidden_states, post, comb)
        post, comb, collapsed = self.ffn_hc(hidden_states)
        output = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
        return _spread(output, hidden_states, post, comb)

    return forward


def _spread(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return layers.ops.mhc_post(output.to(residual.dtype), residual, post.float().unsqueeze(-1), comb.float())


def head(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``DeepseekV4HyperHead``: the streams collapsed before the final norm."""

    def forward(self: Any, x: Tensor) -> Tensor:
        reason = _head_refusal(x.device, x.dtype, *x.shape[-2:], torch.is_grad_enabled())
        if reason is not None:
            HEAD.leave(reason)
            return original(self, x)
        return layers.mhc_head(
            x,
            self.hc_fn.float(),
            self.hc_scale.float(),
            self.hc_base.float(),
            norm_eps=self.input_norm.eps,
            mhc_mult=self.hc_mult,
            pre_eps=self.eps,
        )

    return forward
