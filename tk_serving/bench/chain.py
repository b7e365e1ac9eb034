"""The operators of one decoder layer between its matrix products, as one CUDA graph: ours against an engine's kernels.

A step is one operator, or several that an engine runs as one (``joint``). Every step has inputs of its own, made like
those of the operator's workloads: between the steps of a real layer there are matrix products, which the chain leaves
out. A step that one side cannot run is left out on both, and named.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tk_serving.bench import peers
from tk_serving.bench.agreement import DIFFERENT, Agreement
from tk_serving.bench.implementations import OURS, Bench, Subject
from tk_serving.bench.peers import PeerCall, PeerUnavailableError, engine_of
from tk_serving.bench.record import ChainRow
from tk_serving.bench.selection import Task
from tk_serving.bench.timing import GRAPH, SampleError, Sampler, measure
from tk_serving.operator import find
from tk_serving.workloads import Workload

TOKENS = (1, 8, 64, 512, 4096, 8192)


@dataclass(frozen=True)
class Part:
    """An operator with the parameters of its workload for the model, some of them changed."""

    operator: str
    change: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What happens at one place of the layer. ``joint``: engine -> its function for all parts at once."""

    place: str
    parts: tuple[Part, ...]
    joint: Mapping[str, str] = field(default_factory=dict)


def _one(place: str, operator: str, **change: Any) -> Step:
    return Step(place, (Part(operator, change),))


_EXPERTS = (
    Step(
        "expert mapping and expand",
        (Part("get_fused_mapping"), Part("expand_to_fused_with_sf")),
        {"vllm": "moe_permute"},
    ),
    _one("expert SwiGLU and cast", "swiglu_forward_and_per_token_cast"),
    _one("expert reduce", "reduce_fused"),
)


def _boundary(sublayer: str) -> Step:
    """End of one sublayer and start of the next in a model with hyper-connections."""
    parts = (Part("mhc_post"), Part("mhc_pre_big_fuse"), Part("norm_forward"), Part("per_token_cast"))
    return Step(f"hyper-connections, norm and cast before {sublayer}", parts, {"vllm": "mhc_boundary"})


CHAINS: dict[str, tuple[Step, ...]] = {
    "v3": (
        _one("norm before attention", "norm_forward"),
        _one("cast before attention", "per_token_cast"),
        _one("rotary embedding", "apply_rotary"),
        _one("cast before the output projection", "per_token_cast", hidden=128 * 128),
        _one("norm before the experts", "norm_forward"),
        _one("router", "top2_sum_gate"),
        _one("cast before the experts", "per_token_cast"),
        *_EXPERTS,
    ),
    "v4-flash": (
        _boundary("attention"),
        _one("rotary embedding", "apply_rotary"),
        _boundary("the experts"),
        _one("router", "moe_topk_gate"),
        *_EXPERTS,
    ),
}


class Chain:
    """One chain at one token count, against one engine of this process."""

    def __init__(self, model: str, engine: str, tokens: int, bench: Bench) -> None:
        self._bench, self._engine = bench, engine
        self._sides: dict[str, list[Callable[[int], PeerCall]]] = {OURS: [], engine: []}
        self.row = ChainRow(model, tokens, peer=engine)
        for step in CHAINS[model]:
            try:
                self._add(step, model, tokens)
            except PeerUnavailableError as reason:
                self.row.left_out[step.place] = str(reason)
            except Exception as error:
                bench.survive(error)
                self.row.left_out[step.place] = f"fails with {type(error).__name__}: {peers.first_line(error)}"

    def measure(self, rounds: int) -> ChainRow:
        """Time both sides; what fails is part of the row."""
        row = self.row
        kinds = [step[side] for step in row.steps for side in ("ours", "engine") if step[side]]
        row.equal = DIFFERENT not in kinds if kinds else None
        if not row.steps:
            row.error = "no step that both sides can run"
            return row
        samplers: dict[str, Sampler] = {}
        try:
            for name, side in self._sides.items():
                samplers[name] = self._bench.timer.prepare(functools.partial(_sequence, side), GRAPH)
            timed = measure(samplers, rounds)
        except Exception as error:
            self._bench.survive(error)
            row.error = str(error) if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"
            return row
        finally:
            for sampler in samplers.values():
                with contextlib.suppress(RuntimeError):
                    sampler.release()
        row.us, row.p10, row.p90 = timed[OURS].median, timed[OURS].p10, timed[OURS].p90
        row.peer_us = timed[self._engine].median
        row.ratio = row.peer_us / row.us
        return row

    def _add(self, step: Step, model: str, tokens: int) -> None:
        subjects = [Subject(_task(part, model, tokens), self._bench.device) for part in step.parts]
        ours = [_checked(subject, OURS, self._bench.check) for subject in subjects]
        if self._engine in step.joint:
            function = getattr(peers.engine_module(self._engine), step.joint[self._engine])
            joint = _joint(function, subjects)
            joint(0).run()
            theirs = [(joint, Agreement(None))]
        else:
            theirs = [_checked(subject, _declared(subject, self._engine), self._bench.check) for subject in subjects]
        self._sides[OURS] += [call for call, _ in ours]
        self._sides[self._engine] += [call for call, _ in theirs]
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
    return Task(op, Workload(f"{model} layer", {**known[0].params, **part.change}, (tokens,), model), tokens)


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


def _sequence(side: Sequence[Callable[[int], PeerCall]], index: int) -> Callable[[], list[Any]]:
    runs = [make(index).run for make in side]
    return lambda: [run() for run in runs]


def _worst(agreements: Sequence[Agreement]) -> str | None:
    order = {None: 0, "equal": 1, "close": 2, "different": 3}
    kinds = [agreement.kind for agreement in agreements]
    return max(kinds, key=lambda kind: order.get(kind, math.inf))
