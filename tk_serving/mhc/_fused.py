"""The fused steps between two sublayers: one plan and one reference for all their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.expect import Expect
from tk_serving.mhc import _partials, _pre
from tk_serving.mhc._math import inverse_rms, weighted_sum
from tk_serving.mhc._shapes import BF16, F32, MIXES, MULT, count, lead, rows
from tk_serving.mhc.mhc_post import mhc_post
from tk_serving.mhc.mhc_pre_apply_mix import mhc_pre_apply_mix
from tk_serving.mhc.mhc_pre_big_fuse import mhc_pre_big_fuse
from tk_serving.operator import Launch, Out, Plan, Quantized
from tk_serving.quant import casting, scales
from tk_serving.quant.per_token_cast import per_token_cast

GROUPS = (32, 128)
APART = (7168, 64)
"""Hidden size and tokens from which a launch of its own updates the streams.

On an H200 the pass that also updates them took 318 us for 4096 tokens of 7168, 17.4 for 64 and 10.0 for one; the two
operators one after the other 295, 15.4 and 11.0. At hidden sizes 4096 and 5120 the one pass is faster for 4096 tokens.
"""


class LayerInput(NamedTuple):
    """What a sublayer and its residual update need.

    Attributes:
        post: float32 [..., 4, 1].
        comb: float32 [..., 4, 4].
        layer_input: bfloat16 [..., H], or None where only the quantised form was asked for.
        quantized: (data [T, H], sf), or None without ``fmt``.
        pre_mix: float32 [..., 4, 1] for the next sublayer, or None where the pre mix is not delayed.
    """

    post: Tensor
    comb: Tensor
    layer_input: Tensor | None
    quantized: Quantized | None
    pre_mix: Tensor | None


class UpdatedLayerInput(NamedTuple):
    """:class:`LayerInput` behind ``residual``: bfloat16 [..., 4, H], the updated streams."""

    residual: Tensor
    post: Tensor
    comb: Tensor
    layer_input: Tensor | None
    quantized: Quantized | None
    pre_mix: Tensor | None


@dataclass(slots=True)
class Step:
    """The arguments of one call.

    ``update``: x, post and comb of the sublayer before, or None.
    """

    residual: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    rms_eps: float
    pre_eps: float
    sinkhorn_eps: float
    post_mult: float
    repeat: int
    n_splits: int
    norm_weight: Tensor | None
    norm_eps: float
    fmt: str | None
    npc: int
    column_major: bool
    round_sf: bool
    packed: bool
    with_out_bf16: bool
    delayed: bool
    pre_mix: Tensor | None
    rms_before_rounding: bool
    update: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def store(self) -> bool:
        return self.fmt is None or self.with_out_bf16

    def plan(self, expect: Expect, step: Callable[..., Step]) -> Plan:
        """Results: (updated streams), post, comb, layer input, data, sf, pre mix.

        ``step`` makes the step of a call from its arguments: launches hold no tensors of the call that was planned.
        """
        update = self.update or ()
        _pre.refuse_autograd(expect.operator, self.residual, self.fn, self.scale, self.base, *update)
        tokens, size = _partials.check(expect, self.residual, self.fn, None, self.n_splits, mixes=MIXES)
        _pre.check_gates(expect, self.scale, self.base, self.repeat)
        if self.update:
            x, post, comb = self.update
            lead(expect, "x", x, BF16, size, like=tokens)
            lead(expect, "post_layer_mix", post, F32, MULT, 1, like=tokens)
            lead(expect, "comb_res_mix", comb, F32, MULT, MULT, like=tokens)
        if self.pre_mix is not None:
            expect.that(self.delayed, "pre_mix", "None, as the pre mix is not delayed", "a tensor")
            lead(expect, "pre_mix", self.pre_mix, F32, MULT, 1, like=tokens)
        layout = self._check_output(expect, size)
        expect.same_device(
            residual=self.residual,
            mhc_scale=self.scale,
            mhc_base=self.base,
            norm_weight=self.norm_weight,
            pre_mix=self.pre_mix,
            **dict(zip(("x", "post_layer_mix", "comb_res_mix"), update, strict=False)),
        )
        total = count(tokens)
        splits = _partials.num_splits(size, MIXES, self.n_splits)
        row = Out((*tokens, size), BF16)
        outputs = (
            *((Out(tuple(self.residual.shape), BF16),) if self.update else ()),
            *_pre.mix_outputs(tokens),
            row if self.store else None,
            casting.data_out(self.fmt, total, size) if self.fmt else None,
            scales.sf_out(layout, total, -(-size // self.npc)) if self.fmt else None,
            Out((*tokens, MULT, 1), F32) if self.delayed else None,
        )
        # A delayed pre mix is known before the pass over the streams, which then writes the input itself.
        raw = self.delayed and (self.norm_weight is not None or self.fmt is not None)
        scratch = (*_partials.outputs(splits, total, MIXES), *((row,) if raw else ()))
        apart = self.update is not None and size >= APART[0] and total >= APART[1]
        early = _partials.launches_early(size, total)
        launches = self._launches(step, size, splits, layout, len(outputs), apart, early) if total else ()
        return Plan(outputs, launches, scratch)

    def _check_output(self, expect: Expect, size: int) -> str:
        if self.norm_weight is not None:
            expect.tensor("norm_weight", self.norm_weight, (BF16, F32), (size,))
        if self.rms_before_rounding:
            expect.that(self.norm_weight is not None, "rms_before_rounding", "False, as there is no norm_weight", True)
            expect.that(not self.delayed, "rms_before_rounding", "False, as the pre mix is delayed", True)
        if self.fmt is None:
            flags = {
                "use_tma_aligned_col_major_sf": self.column_major,
                "round_sf": self.round_sf,
                "use_packed_ue8m0": self.packed,
                "with_out_bf16": self.with_out_bf16,
            }
            for name, flag in flags.items():
                expect.that(not flag, name, "False, as there is no fmt", True)
            return scales.ROW
        expect.one_of("fmt", self.fmt, ("e4m3",))
        expect.one_of("num_per_channels", self.npc, GROUPS)
        return scales.layout_of(expect, self.column_major, self.round_sf, self.packed)

    def _launches(
        self, step: Callable[..., Step], size: int, splits: int, layout: str, at: int, apart: bool, early: bool
    ) -> tuple[Launch, ...]:
        updated = self.update is not None
        first = 1 if updated else 0
        delayed, gathered = self.delayed, not self.delayed
        kept = delayed and self.norm_weight is None and self.fmt is None  # the pass over the streams writes the input
        raw = first + 2 if kept else at + 2
        store = self.store and not kept

        def update(outs: Sequence[Tensor], *args: Any) -> tuple[Tensor, ...]:
            given = step(*args)
            assert given.update is not None
            x, post, comb = given.update
            streams = rows(given.residual, MULT, size)
            return rows(x, size), streams, rows(post, MULT), rows(comb, MULT * MULT), outs[0].view(-1, MULT, size)

        def stream_pass(outs: Sequence[Tensor], *args: Any) -> _partials.Tensors:
            given = step(*args)
            x, post, comb = (None if apart else given.update) or (None, None, None)
            return _partials.Tensors(
                outs[0] if apart else given.residual,
                given.fn,
                outs[at],
                outs[at + 1],
                x=x,
                post=post,
                comb=comb,
                updated=outs[0] if updated and not apart else None,
                pre=given.pre_mix,
                layer_input=outs[raw] if delayed else None,
            )

        def finish(outs: Sequence[Tensor], *args: Any) -> _pre.Tensors:
            given = step(*args)
            streams = outs[0] if updated else given.residual
            return _pre.Tensors(
                outs[at],
                outs[at + 1],
                given.scale,
                given.base,
                streams if gathered else outs[raw],
                norm_weight=given.norm_weight,
                post=outs[first],
                comb=outs[first + 1],
                out=outs[first + 2] if store else None,
                data=outs[first + 3],
                sf=outs[first + 4],
                pre=outs[first + 5],
            )

        source = _partials.NONE if gathered else _partials.FIRST if self.pre_mix is None else _partials.MIXED
        values = _pre.Values(self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult, self.repeat, self.norm_eps)
        return (
            *((Launch("mhc.post", {"hidden": size}, update),) if apart else ()),
            _partials.launch(
                size, MIXES, splits, stream_pass, update=updated and not apart, next_input=source, pdl=early
            ),
            _pre.finish(
                size,
                splits,
                values,
                finish,
                source=_pre.GATHERED if gathered else _pre.GIVEN,
                with_pre=delayed,
                norm_weight=self.norm_weight,
                rms_before_rounding=self.rms_before_rounding,
                store=store,
                fmt=self.fmt or "",
                npc=self.npc,
                layout=layout,
                round_sf=self.round_sf,
                pdl=early,
                trigger_last=True,  # Sinkhorn takes 10 us instead of 4 beside a product that has begun to wait
            ),
        )

    def reference(self) -> tuple:
        """Results as in :meth:`plan`, the quantised form as a pair."""
        residual = self.residual
        if self.update:
            x, post, comb = self.update
            residual = mhc_post.operator.reference(x, residual, post, comb)
        post, comb, layer_input, pre = mhc_pre_big_fuse.operator.reference(
            residual,
            self.fn,
            self.scale,
            self.base,
            self.rms_eps,
            self.pre_eps,
            self.sinkhorn_eps,
            self.post_mult,
            self.repeat,
            self.n_splits,
            with_pre_mix=True,
        )
        if self.delayed:
            first = self.pre_mix is None
            layer_input = residual[..., 0, :] if first else mhc_pre_apply_mix.operator.reference(residual, self.pre_mix)
        unrounded = weighted_sum(residual, pre) if self.rms_before_rounding else layer_input
        layer_input, quantised = self._finish_reference(layer_input, unrounded)
        updated = (residual,) if self.update else ()
        return *updated, post, comb, layer_input, quantised, pre if self.delayed else None

    def _finish_reference(self, row: Tensor, measured: Tensor) -> tuple[Tensor | None, Quantized | None]:
        """``measured``: the row whose RMS the norm takes."""
        size = row.shape[-1]
        if self.norm_weight is not None:
            scale = inverse_rms(wide(measured).square().sum(dim=-1, keepdim=True), size, self.norm_eps)
            row = (wide(row) * scale * wide(self.norm_weight)).to(row.dtype)
        if self.fmt is None:
            return row, None
        cast = per_token_cast.operator.reference(
            row.reshape(-1, size), self.fmt, self.npc, None, self.column_major, self.round_sf, self.packed
        )
        return (row if self.with_out_bf16 else None), cast

    def results(self, flat: Sequence[Tensor]) -> LayerInput | UpdatedLayerInput:
        """The public result from the tensors of the schema, absent ones being placeholders."""
        updated, (post, comb, row, data, sf, pre) = flat[:-6], flat[-6:]
        given: tuple[Any, ...] = (
            post,
            comb,
            row if self.store else None,
            (data, sf) if self.fmt else None,
            pre if self.delayed else None,
        )
        return UpdatedLayerInput(updated[0], *given) if updated else LayerInput(*given)
