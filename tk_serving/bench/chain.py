"""The operators of one decoder layer between its matrix products, as one CUDA graph: ours against an engine's kernels.

A step is what happens at one place of the layer: one or more of our operators, and either the engine's kernels for the
same operators or, where it cuts differently, its own sequence (``joint``). Every part has inputs of its own: between
the parts of a real layer there are matrix products, which the chain leaves out. What no product lies between, as the
mapping and all that goes by it, is taken from the part before, as the engine's sequence does (``ours``). The expert
steps share one random routing, and their buffers have the capacity that the engine would allocate. A step that one side
cannot run is left out on both, and named.

A chain is named after its model, or ``model:part`` if it is a part of the layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tk_serving.bench import peers
from tk_serving.bench.agreement import DIFFERENT, Agreement, alike
from tk_serving.bench.implementations import OURS, Bench, Subject
from tk_serving.bench.peers import PeerCall, PeerUnavailableError, engine_of
from tk_serving.bench.record import ChainRow
from tk_serving.bench.routing import experts, routing
from tk_serving.bench.selection import Task
from tk_serving.bench.targets import CHAIN
from tk_serving.bench.timing import GRAPH, Footprint, SampleError, Sampler, Statistics, measure
from tk_serving.operator import find
from tk_serving.workloads import MODELS, Maker, Model, Workload

log = logging.getLogger(__name__)

TOKENS = (1, 8, 64, 512, 4096, 8192)
ALIGNMENT = 128


@dataclass(frozen=True)
class Layer:
    """One layer at one token count."""

    model: Model
    tokens: int

    @property
    def rows(self) -> int:
        """Capacity of the expert-major buffers: what the routed pairs can need with every region aligned."""
        pairs = self.tokens * self.model.num_experts_per_tok
        most = pairs + min(pairs, self.model.n_routed_experts) * (ALIGNMENT - 1)
        return -(-most // ALIGNMENT) * ALIGNMENT

    def ids(self, device: torch.device) -> Tensor:
        """int64 [T, K]: the same random choices for every part."""
        return Maker(device).topk_ids(self.tokens, self.model.n_routed_experts, self.model.num_experts_per_tok)

    def mapping(self, device: torch.device) -> dict[str, Tensor]:
        """The results of ``get_fused_mapping`` for these choices, by name."""
        arguments = (self.ids(device), self.model.n_routed_experts, self.rows, ALIGNMENT)
        found = find("get_fused_mapping").call("reference", *arguments)
        return dict(
            zip(("pos_to_expert", "pos_to_token", "pos_to_token_topk", "token_topk_to_pos"), found, strict=False)
        )


Arguments = Callable[[Layer, Maker], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """An operator with the inputs of its workload for the model.

    Attributes:
        operator: its name.
        change: parameters of the workload that differ.
        rows: the layer's number of rows at this place; its tokens by default.
        arguments: public arguments that differ.
    """

    operator: str
    change: Mapping[str, Any] = field(default_factory=dict)
    rows: Callable[[Layer], int] = lambda layer: layer.tokens
    arguments: Arguments = lambda layer, make: {}


@dataclass(frozen=True)
class Step:
    """What happens at one place of the layer.

    Attributes:
        place: its name.
        parts: our operators.
        joint: engine -> its function for all parts at once.
        ours: the same for us; the parts one after another by default.
    """

    place: str
    parts: tuple[Part, ...]
    joint: Mapping[str, str] = field(default_factory=dict)
    ours: Callable[..., PeerCall] | None = None


def _mapping_arguments(layer: Layer, make: Maker) -> dict[str, Any]:
    return {"topk_idx": layer.ids(make.device), "num_expanded_tokens": layer.rows, "force_no_sync": True}


def _expand_arguments(layer: Layer, make: Maker) -> dict[str, Any]:
    found = layer.mapping(make.device)
    # The grouped product skips padding rows, or leaves what becomes of them to itself.
    return {name: found[name] for name in ("token_topk_to_pos", "pos_to_expert")} | {"zero_padding": False}


def _swiglu_arguments(layer: Layer, make: Maker) -> dict[str, Any]:
    found = layer.mapping(make.device)
    weights = make.rand(layer.tokens, layer.model.num_experts_per_tok)
    given = {name: found[name] for name in ("pos_to_token_topk", "pos_to_expert")}
    return {"topk_weights": weights, "zero_padding": False} | given


def _reduce_arguments(layer: Layer, make: Maker) -> dict[str, Any]:
    x = make.randn(layer.rows, layer.model.hidden_size, dtype=torch.bfloat16)
    # The routing weights are part of the SwiGLU.
    return {"x": x, "topk_weights": None, "token_topk_to_pos": layer.mapping(make.device)["token_topk_to_pos"]}


def _shared_arguments(layer: Layer, make: Maker) -> dict[str, Any]:
    return dict.fromkeys(("pos_to_token_topk", "topk_weights", "pos_to_expert"))


def _norm(out_bf16: bool) -> Part:
    """The sum with the residual, its norm, and the cast."""
    return Part("norm_forward_and_per_token_cast", arguments=lambda layer, make: {"with_out_bf16": out_bf16})


def _boundary(sublayer: str, out_bf16: bool) -> Step:
    """End of one sublayer and start of the next in a model with hyper-connections."""
    part = Part("mhc_post_pre_fused", arguments=lambda layer, make: {"with_out_bf16": out_bf16})
    return Step(f"hyper-connections, norm and cast before {sublayer}", (part,))


_EXPERTS = (
    Step(
        "experts: mapping, expand, SwiGLU and cast, reduce with the shared expert",
        (
            Part("get_fused_mapping", arguments=_mapping_arguments),
            Part("expand_to_fused_with_sf", arguments=_expand_arguments),
            Part("swiglu_forward_and_per_token_cast", rows=lambda layer: layer.rows, arguments=_swiglu_arguments),
            Part("reduce_fused_add", arguments=_reduce_arguments),
        ),
        {"vllm": "experts"},
        experts,
    ),
    Step(
        "shared expert: SwiGLU and cast",
        (Part("swiglu_forward_and_per_token_cast", arguments=_shared_arguments),),
        {"vllm": "shared_expert"},
    ),
)


def _routing(gate: str) -> Step:
    parts = (
        Part(gate),
        Part("get_fused_mapping", arguments=_mapping_arguments),
        Part("expand_to_fused_and_cast", arguments=_expand_arguments),
    )
    return Step("router, mapping, expansion and cast", parts, {"vllm": "routing"}, routing)


CHAINS: dict[str, tuple[Step, ...]] = {
    "v3": (
        Step("norm and cast before attention", (_norm(False),)),
        Step("rotary embedding", (Part("apply_rotary"),)),
        Step("cast before the output projection", (Part("per_token_cast", {"hidden": 128 * 128}),)),
        Step("norm and cast before the experts", (_norm(True),)),
        Step("router", (Part("top2_sum_gate"),)),
        *_EXPERTS,
    ),
    "v4-flash": (
        _boundary("attention", False),
        Step("rotary embedding", (Part("apply_rotary"),)),
        _boundary("the experts", True),
        Step("router", (Part("moe_topk_gate"),)),
        *_EXPERTS,
    ),
    "v3:routing": (_routing("top2_sum_gate"),),
    "v4-flash:routing": (_routing("moe_topk_gate"),),
}


class Chain:
    """One chain at one token count, against one engine of this process."""

    def __init__(self, name: str, engine: str, tokens: int, bench: Bench) -> None:
        self._bench, self._engine = bench, engine
        self._calls: list[dict[str, list[Callable[[int], PeerCall]]]] = []  # of each step by side
        self._footprints: list[Footprint] = []
        self.row = ChainRow(name, tokens, peer=engine)
        for step in CHAINS[name]:
            try:
                self._add(step, name.partition(":")[0], tokens)
            except PeerUnavailableError as reason:
                self.row.left_out[step.place] = str(reason)
            except Exception as error:
                log.warning("chain %s, %d tokens: %s fails", name, tokens, step.place, exc_info=True)
                bench.survive(error)
                self.row.left_out[step.place] = f"fails with {type(error).__name__}: {peers.first_line(error)}"

    def measure(self, rounds: int) -> ChainRow:
        """Time both sides, and each step where the whole misses its target; what fails is part of the row."""
        row = self.row
        kinds = [step[side] for step in row.steps for side in ("ours", "engine") if step[side]]
        row.equal = DIFFERENT not in kinds if kinds else None
        if not row.steps:
            row.error = "no step that both sides can run"
            return row
        try:
            timed = self._time(self._calls, self._footprints, rounds)
            row.us, row.p10, row.p90 = timed[OURS].median, timed[OURS].p10, timed[OURS].p90
            row.peer_us = timed[self._engine].median
            row.ratio = row.peer_us / row.us
            alone = zip(row.steps, self._calls, self._footprints, strict=True) if row.ratio < CHAIN else ()
            for step, calls, footprint in alone:
                timed = self._time([calls], [footprint], rounds)
                step["us"], step["engine_us"] = timed[OURS].median, timed[self._engine].median
        except Exception as error:
            self._bench.survive(error)
            row.error = str(error) if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"
        return row

    def _time(
        self,
        steps: Sequence[dict[str, list[Callable[[int], PeerCall]]]],
        footprints: Sequence[Footprint],
        rounds: int,
    ) -> dict[str, Statistics]:
        samplers: dict[str, Sampler] = {}
        footprint = Footprint.of_sequence(footprints)
        try:
            for name in (OURS, self._engine):
                side = [call for step in steps for call in step[name]]
                samplers[name] = self._bench.timer.prepare(functools.partial(_sequence, side), GRAPH, footprint)
            return measure(samplers, rounds)
        finally:
            for sampler in samplers.values():
                with contextlib.suppress(RuntimeError):
                    sampler.release()

    def _add(self, step: Step, model: str, tokens: int) -> None:
        subjects = [Subject(_task(part, model, tokens), self._bench.device) for part in step.parts]
        ours = [_checked(subject, OURS, self._bench.check) for subject in subjects]
        calls = [call for call, _ in ours] if step.ours is None else [_joint(step.ours, subjects)]
        if self._engine in step.joint:
            function = getattr(peers.engine_module(self._engine), step.joint[self._engine])
            together = calls[0] if step.ours is not None and self._bench.check else None
            theirs = [_compared(_joint(function, subjects), together)]
        else:
            theirs = [_checked(subject, _declared(subject, self._engine), self._bench.check) for subject in subjects]
        self._footprints.append(Footprint.of_sequence(subject.footprint for subject in subjects))
        self._calls.append({OURS: calls, self._engine: [call for call, _ in theirs]})
        self.row.steps.append(
            {
                "place": step.place,
                "operators": [part.operator for part in step.parts],
                "ours": _worst([agreement for _, agreement in ours]),
                "engine": _worst([agreement for _, agreement in theirs]),
            }
        )


def _task(part: Part, model: str, tokens: int) -> Task:
    try:
        op = find(part.operator)
    except ValueError as error:
        raise PeerUnavailableError(str(error)) from error
    known = [workload for workload in op.workloads if workload.model == model]
    if not known:
        raise PeerUnavailableError(f"{op.name} has no workload of {model}")
    unknown = part.change.keys() - known[0].params.keys()
    if unknown:
        raise PeerUnavailableError(f"the workloads of {op.name} have no {', '.join(sorted(unknown))}")
    layer = Layer(next(known_model for known_model in MODELS if known_model.key == model), tokens)
    rows = part.rows(layer)
    workload = Workload(f"{model} layer", {**known[0].params, **part.change}, (rows,), model)

    def inputs(make: Maker, **parameters: Any) -> tuple:
        arguments = dict(zip(op.signature.parameters, op.bind(*op.inputs(make, **parameters)), strict=True))
        return tuple({**arguments, **part.arguments(layer, make)}.values())

    return Task(dataclasses.replace(op, inputs=inputs), workload, rows)


def _declared(subject: Subject, engine: str) -> str:
    op = subject.task.op
    peer = next((peer for peer in op.peers if engine_of(peer) == engine), None)
    if peer is None:
        raise PeerUnavailableError(f"{op.name} declares no kernel of {engine}")
    return peer


def _checked(subject: Subject, name: str, check: bool) -> tuple[Callable[[int], PeerCall], Agreement]:
    make = subject.maker(name)
    make(subject.inputs[0]).run()
    agreement = subject.agreement(name, make) if check else Agreement(None, "not compared")
    return lambda index: make(subject.inputs[index]), agreement


def _joint(function: Callable[..., PeerCall], subjects: Sequence[Subject]) -> Callable[[int], PeerCall]:
    return lambda index: function(*(subject.inputs.by_name(subject.inputs[index]) for subject in subjects))


def _compared(
    engine: Callable[[int], PeerCall], ours: Callable[[int], PeerCall] | None
) -> tuple[Callable[[int], PeerCall], Agreement]:
    """A joint call of the engine, compared with one of ours."""
    call = engine(0)
    found = call.run()
    if ours is None or call.result is None:
        return engine, Agreement(None)
    own = ours(0)
    return engine, alike(call.result(found), own.result(own.run()) if own.result else ())


def _sequence(side: Sequence[Callable[[int], PeerCall]], index: int) -> Callable[[], list[Any]]:
    runs = [make(index).run for make in side]
    return lambda: [run() for run in runs]


def _worst(agreements: Sequence[Agreement]) -> str | None:
    order = {None: 0, "equal": 1, "close": 2, "different": 3}
    kinds = [agreement.kind for agreement in agreements]
    return max(kinds, key=lambda kind: order.get(kind, math.inf))
