"""Everything before a sublayer for a serving engine: mixes, input, and where asked its norm and its FP8 form."""

from typing import Any

from torch import Tensor

from tk_serving.compare import Close
from tk_serving.expect import Expect
from tk_serving.mhc._fused import LayerInput, Step
from tk_serving.mhc._shapes import BF16, MIXES, MULT
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.workloads import Maker, Model, serving, variants

_expect = Expect("mhc_pre_fused")


def _plan(*args: Any) -> Plan:
    return Step(*args).plan(_expect, Step)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    splits: int = 16,
    norm: bool = True,
    fmt: str | None = None,
    npc: int = 128,
    column_major: bool = False,
    packed: bool = False,
    round_sf: bool = False,
    with_bf16: bool = False,
    delayed: bool = False,
    first: bool = False,
    before_rounding: bool = False,
) -> tuple:
    return (
        make.randn(tokens, MULT, hidden, dtype=BF16),
        make.randn(MIXES, MULT * hidden, scale=(MULT * hidden) ** -0.5),
        make.randn(3),
        make.randn(MIXES),
        1e-6,
        1e-6,
        1e-6,
        2.0,
        20,
        splits,
        make.rand(hidden).to(BF16) if norm else None,
        1e-6,
        fmt,
        npc,
        column_major,
        round_sf or packed,
        packed,
        with_bf16,
        delayed,
        make.rand(tokens, MULT, 1) if delayed and not first else None,
        before_rounding,
    )


def serving_form(model: Model) -> dict | None:
    """What the sublayers of a checkpoint take: its activation scales, both forms of the input, its pre mix."""
    if not model.hc_mult:
        return None
    mx = model.quant_group == 32
    return {
        "hidden": model.hidden_size,
        "fmt": "e4m3",
        "npc": model.quant_group,
        "column_major": True,
        "packed": mx,
        "with_bf16": True,
        "delayed": mx,
    }


def engine_forms(model: Model) -> list[dict]:
    """As engines on Hopper ask: with the norm alone, until a linear layer has said how it quantises its input.

    Their norm takes the RMS before the row is rounded, except where the pre mix is delayed.
    """
    if not model.hc_mult:
        return []
    if model.quant_group == 32:
        forms: tuple[dict, ...] = ({"delayed": True}, {"delayed": True, "first": True})
    else:
        norm = {"before_rounding": True}
        forms = (norm, {**norm, "fmt": "e4m3", "column_major": True, "round_sf": True, "with_bf16": True})
    return [{"hidden": model.hidden_size, **form} for form in forms]


MIX, ROW, CODES, SCALES = Close(1e-3, 1e-3), Close(1e-2, 1e-2), Close(0.126, 2.0**-9), Close(1e-2, 0.0)
"""Kernels sum the matrix product in another order: a row may differ by a step of bfloat16, a code by one of e4m3."""


@operator(
    spec="operators.md P41, A3, A4",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=(MIX, MIX, ROW, CODES, SCALES, MIX),
    finish=lambda flat, *args: Step(*args).results(flat),
    cases=[
        {"tokens": 0, "hidden": 128, "fmt": "e4m3", "column_major": True},
        {"tokens": 9, "hidden": 192, "splits": 2},
        {"tokens": 9, "hidden": 192, "splits": 2, "fmt": "e4m3", "column_major": True, "with_bf16": True},
        {
            "tokens": 5,
            "hidden": 192,
            "splits": 2,
            "norm": False,
            "fmt": "e4m3",
            "npc": 32,
            "column_major": True,
            "packed": True,
        },
        {"tokens": 9, "hidden": 192, "splits": 2, "before_rounding": True},
        {"tokens": 5, "hidden": 192, "splits": 2, "norm": False, "delayed": True, "first": True},
        {"tokens": 5, "hidden": 192, "splits": 2, "fmt": "e4m3", "delayed": True, "with_bf16": True},
    ],
    workloads=serving(serving_form),
    variants=variants(engine_forms),
    peers=["vllm", "sglang"],
)
def mhc_pre_fused(
    residual: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor | None, Quantized | None, Tensor | None]:
    """:func:`mhc_pre_big_fuse`, then where asked the norm of the sublayer and the cast of its input, in two launches.

    The mixes and the input are those of :func:`mhc_pre_big_fuse` bit for bit; normalised they are rounded to bfloat16
    before the cast, which follows :func:`per_token_cast`.

    Args:
        residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value,
            sinkhorn_repeat, n_splits: as in :func:`mhc_pre_big_fuse`.
        norm_weight: bfloat16 or float32 [H]: RMS norm of the input, or None.
        norm_eps: of this norm.
        fmt: ``e4m3`` to quantise the input, or None.
        num_per_channels: columns with one scale: 32 or 128.
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: layout and rounding of the scales.
        with_out_bf16: return the bfloat16 input besides the quantised one.
        delayed: the input takes ``pre_mix`` from the sublayer before, and the mix computed here is returned for the
            next one (DeepSeek-V4.1).
        pre_mix: float32 [..., 4, 1], contiguous; None takes the first stream (before the first sublayer).
        rms_before_rounding: the norm takes the RMS of the float32 input, and normalises its bfloat16 form, as by vLLM
            and SGLang for DeepSeek-V4. Needs ``norm_weight``, and a pre mix that is not delayed.

    Returns:
        :class:`LayerInput`: (post, comb, layer_input or None, (data [T, H], sf) or None, pre_mix or None).

    Raises:
        RuntimeError: called where autograd would record it; it is forward only.
    """
    gates = (mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat)
    cast = (fmt, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, with_out_bf16)
    norm, last = (norm_weight, norm_eps), (delayed, pre_mix, rms_before_rounding)
    args: tuple[Any, ...] = (residual, fn, *gates, n_splits, *norm, *cast, *last)
    return LayerInput(*Step(*args).reference())
