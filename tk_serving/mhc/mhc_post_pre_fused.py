"""From the output of one sublayer to the input of the next: the residual streams are read once and written once."""

from typing import Any

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.mhc._fused import Step, UpdatedLayerInput
from tk_serving.mhc._shapes import BF16, MULT
from tk_serving.mhc.mhc_pre_fused import engine_forms, mhc_pre_fused, serving_form
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.workloads import Maker, serving, variants

_expect = Expect("mhc_post_pre_fused")


def _step(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, *args: Any) -> Step:
    arguments: tuple[Any, ...] = (residual, *args, (x, post_layer_mix, comb_res_mix))
    return Step(*arguments)


def _plan(*args: Any) -> Plan:
    return _step(*args).plan(_expect, _step)


def _inputs(make: Maker, *, tokens: int, hidden: int, **form: object) -> tuple:
    residual, *rest = mhc_pre_fused.operator.inputs(make, tokens=tokens, hidden=hidden, **form)
    x = make.randn(tokens, hidden, dtype=BF16)
    return x, residual, make.rand(tokens, MULT, 1), make.rand(tokens, MULT, MULT), *rest


@operator(
    spec="operators.md P39, P41, A3, A4",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=(BITWISE, *mhc_pre_fused.operator.equality),
    finish=lambda flat, *args: _step(*args).results(flat),
    cases=[
        {"tokens": 0, "hidden": 128},
        {"tokens": 37, "hidden": 192, "splits": 2, "norm": False},
        {"tokens": 270, "hidden": 512, "norm": False, "delayed": True},
        {"tokens": 7, "hidden": 192, "splits": 2, "fmt": "e4m3", "column_major": True, "with_bf16": True},
        {"tokens": 3, "hidden": 192, "splits": 2, "fmt": "e4m3", "npc": 32, "delayed": True, "first": True},
        {"tokens": 7, "hidden": 192, "splits": 2, "fmt": "e4m3", "with_bf16": True, "before_rounding": True},
    ],
    workloads=serving(serving_form),
    variants=variants(engine_forms),
    peers=["vllm", "sglang"],
)
def mhc_post_pre_fused(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    fmt: str | None = None,
    num_per_channels: int = 128,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    delayed: bool = False,
    pre_mix: Tensor | None = None,
    rms_before_rounding: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Quantized | None, Tensor | None]:
    """:func:`mhc_post` of one sublayer and :func:`mhc_pre_fused` of the next, in two launches and with the same bits.

    From 64 tokens on, streams of hidden size 7168 take three launches, which is faster.

    Args:
        x: bfloat16 [..., H], contiguous: the output of the sublayer before.
        residual: bfloat16 [..., 4, H], contiguous, H a multiple of 64: the streams before that sublayer.
        post_layer_mix, comb_res_mix: float32 [..., 4, 1] and [..., 4, 4]: its mixes.
        fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, n_splits:
            of the next sublayer, as in :func:`mhc_pre_big_fuse`.
        norm_weight, norm_eps, fmt, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0,
            with_out_bf16, delayed, pre_mix, rms_before_rounding: as in :func:`mhc_pre_fused`.

    Returns:
        :class:`UpdatedLayerInput`: (residual, post, comb, layer_input or None, (data, sf) or None, pre_mix or None).

    Raises:
        RuntimeError: called where autograd would record it; it is forward only.
    """
    gates = (mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat)
    cast = (fmt, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, with_out_bf16)
    norm, last = (norm_weight, norm_eps), (delayed, pre_mix, rms_before_rounding)
    args: tuple[Any, ...] = (fn, *gates, n_splits, *norm, *cast, *last)
    return UpdatedLayerInput(*_step(x, residual, post_layer_mix, comb_res_mix, *args).reference())
