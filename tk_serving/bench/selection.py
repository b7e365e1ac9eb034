"""Which rows to measure: operators, workloads and token counts picked from the declarations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tk_serving.operator import FAMILIES, Operator, find, operators
from tk_serving.workloads import MODELS, PHASES, Workload


@dataclass(frozen=True, eq=False)
class Task:
    """One row: an operator, a workload and a token count."""

    op: Operator
    workload: Workload
    tokens: int

    @property
    def params(self) -> dict[str, Any]:
        return self.workload.params

    def __str__(self) -> str:
        return f"{self.op.qualified_name} {self.workload.label} tokens={self.tokens}"


def select(names: Sequence[str] = (), models: Sequence[str] = (), tokens: Sequence[int] = ()) -> list[Task]:
    """The rows of the named families and operators (all of them by default).

    Args:
        names: families, operators or qualified operators.
        models: keys of models; all by default.
        tokens: token counts instead of those of the workloads' phases. A workload whose sizes are others, such as the
            rows of a weight, is measured at the given ones among them, else at its smallest.

    Raises:
        ValueError: unknown family, operator or model.
    """
    keys = [model.key for model in MODELS]
    for model in models:
        if model not in keys:
            raise ValueError(f"bench: model: expected one of {', '.join(keys)}, got {model!r}")
    tasks = []
    for op in _operators(names):
        wanted = [w for w in op.workloads if not models or w.model in models]
        tasks += [Task(op, workload, count) for workload, count in _rows(wanted, tokens)]
    return tasks


def _operators(names: Sequence[str]) -> list[Operator]:
    declared = operators()
    if not names:
        return declared
    chosen: dict[str, Operator] = {}
    for name in names:
        found = [op for op in declared if op.family == name] if name in FAMILIES else [find(name)]
        chosen |= {op.name: op for op in found}
    return list(chosen.values())


def _rows(workloads: Sequence[Workload], tokens: Sequence[int]) -> list[tuple[Workload, int]]:
    if not tokens:
        return [(workload, count) for workload in workloads for count in workload.tokens]
    # Decode and prefill have the same shapes: a given token count belongs to the phase that is closest to it.
    shapes: dict[tuple, list[Workload]] = {}
    for workload in workloads:
        shapes.setdefault((workload.model, repr(sorted(workload.params.items()))), []).append(workload)
    return [row for same in shapes.values() for row in _of_one_shape(same, tokens)]


def _of_one_shape(same: Sequence[Workload], tokens: Sequence[int]) -> list[tuple[Workload, int]]:
    if any(workload.tokens in PHASES.values() for workload in same):
        return [(min(same, key=lambda w: _distance(w, count)), count) for count in tokens]
    own = {count: workload for workload in same for count in workload.tokens}
    return [(own[count], count) for count in tokens if count in own] or [(own[min(own)], min(own))]


def _distance(workload: Workload, count: int) -> float:
    return min(abs(math.log2(max(count, 1) / max(known, 1))) for known in workload.tokens)
