"""Sublayer inputs and residual streams of several layers, computed again from what a checkpointed pass has kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.mhc._shapes import BF16, F32, MULT, count, hidden, lead, rows
from tk_serving.mhc.mhc_post import mhc_post
from tk_serving.mhc.mhc_pre_apply_mix import mhc_pre_apply_mix
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_multilayer_recompute")
_LAYERS = 12  # of one launch


def _plan(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> Plan:
    size = hidden(_expect, "initial_residual", initial_residual)
    tokens = lead(_expect, "initial_residual", initial_residual, BF16, MULT, "H")
    layers, updates = len(pre_mix_list), len(residual_list)
    _expect.that(layers >= 1, "pre_mix_list", "at least 1 tensor", layers)
    _expect.that(updates in (layers, layers - 1), "residual_list", f"{layers} or {layers - 1} tensors", updates)
    for name, tensors, number, dtype, tail in (
        ("pre_mix_list", pre_mix_list, layers, F32, (MULT, 1)),
        ("layer_input_list", layer_input_list, layers, BF16, (size,)),
        ("layer_output_list", layer_output_list, updates, BF16, (size,)),
        ("post_mix_list", post_mix_list, updates, F32, (MULT, 1)),
        ("comb_mix_list", comb_mix_list, updates, F32, (MULT, MULT)),
        ("residual_list", residual_list, updates, BF16, (MULT, size)),
    ):
        _expect.that(len(tensors) == number, name, f"{number} tensors", len(tensors))
        for i, tensor in enumerate(tensors):
            lead(_expect, f"{name}[{i}]", tensor, dtype, *tail, like=tokens)
            _expect.same_device(initial_residual=initial_residual, **{f"{name}[{i}]": tensor})
    for name, written in (("layer_input_list", layer_input_list), ("residual_list", residual_list)):
        for i, tensor in enumerate(written):
            _expect.that(aligned(tensor.view(-1)), f"{name}[{i}]", "a 16-byte aligned tensor", "a misaligned one")
    starts = range(0, layers, _LAYERS)
    launches = tuple(_launch(size, start, min(_LAYERS, layers - start), updates) for start in starts)
    return Plan((), launches if count(tokens) else ())


def _launch(size: int, start: int, layers: int, updates: int) -> Launch:
    def arguments(_: Sequence[Tensor], initial: Tensor, *lists: list[Tensor]) -> tuple:
        pre, outputs, post, comb, inputs, residual = lists
        initial = residual[start - 1] if start else initial
        # Slots without a layer or an update get tensors of the right shape, which the kernel does not touch.
        spare_row, spare_mix = inputs[start], pre[start].view(-1, MULT)
        spare_comb = spare_mix.new_empty(()).expand(spare_mix.shape[0], MULT * MULT) if not comb else comb[0]
        flat: list[Tensor] = [rows(initial, MULT, size)]
        for slot in range(start, start + _LAYERS):
            here, update = slot < start + layers, slot < min(start + layers, updates)
            flat += (
                rows(pre[slot], MULT) if here else spare_mix,
                (inputs[slot] if here else spare_row).view(-1, size),
                rows(outputs[slot] if update else spare_row, size),
                rows(post[slot], MULT) if update else spare_mix,
                rows(comb[slot] if update else spare_comb, MULT * MULT),
                residual[slot].view(-1, MULT, size) if update else flat[0],
            )
        return tuple(flat)

    config = {"hidden": size, "layers": layers, "last_update": updates >= start + layers}
    return Launch("mhc.recompute", config, arguments, pdl=False)  # its loads have to overtake its stores


def _inputs(make: Maker, *, tokens: int, hidden: int, layers: int = 10, last_update: bool = False) -> tuple:
    updates = layers if last_update else layers - 1

    def several(number: int, *shape: int, bf16: bool = True) -> list[Tensor]:
        return [
            make.randn(tokens, *shape, dtype=BF16) if bf16 else make.rand(tokens, *shape) * 0.5 for _ in range(number)
        ]

    return (
        make.randn(tokens, MULT, hidden, dtype=BF16),
        several(layers, MULT, 1, bf16=False),
        several(updates, hidden),
        several(updates, MULT, 1, bf16=False),
        several(updates, MULT, MULT, bf16=False),
        [t.new_empty(t.shape) for t in several(layers, hidden)],
        [t.new_empty(t.shape) for t in several(updates, MULT, hidden)],
    )


@operator(
    spec="operators.md P42",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("layer_input_list", "residual_list"),
    cases=[
        {"tokens": 0, "hidden": 128, "layers": 2},
        {"tokens": 3, "hidden": 128, "layers": 1},
        {"tokens": 3, "hidden": 128, "layers": 6},
        {"tokens": 2, "hidden": 192, "layers": 4, "last_update": True},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["tile_kernels"],
)
def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> None:
    """Inputs and residual streams of L sublayers, from their mixes and outputs.

    For each l: ``layer_input[l] = mhc_pre_apply_mix(residual, pre[l])``, then
    ``residual = mhc_post(layer_output[l], residual, post[l], comb[l])``, which is written to ``residual_list[l]``. The
    same bits as these calls one after the other.

    Args:
        initial_residual: bfloat16 [..., 4, H], contiguous: the streams before the first of the L sublayers.
        pre_mix_list: L float32 [..., 4, 1].
        layer_output_list: L or L - 1 bfloat16 [..., H]; the following lists of updates have its length.
        post_mix_list, comb_mix_list: float32 [..., 4, 1] and [..., 4, 4].
        layer_input_list: L bfloat16 [..., H]; written.
        residual_list: bfloat16 [..., 4, H]; written.
    """
    residual = initial_residual
    for layer, pre in enumerate(pre_mix_list):
        layer_input_list[layer].copy_(mhc_pre_apply_mix.operator.reference(residual, pre))
        if layer < len(residual_list):
            residual = mhc_post.operator.reference(
                layer_output_list[layer], residual, post_mix_list[layer], comb_mix_list[layer]
            )
            residual_list[layer].copy_(residual)
