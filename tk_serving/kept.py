"""Plans of earlier calls, kept for calls of the same form: the layers of a model call an operator alike.

A plan follows from metadata: shapes, strides, dtypes, devices, alignment, the room behind tensors that are written, and
the arguments that are no tensors. What a launch is given comes from the tensors of its own call; a plan that holds
tensors is not kept.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tk_serving import config
from tk_serving.layout import WORD
from tk_serving.plan import Plan

if TYPE_CHECKING:
    from tk_serving.operator import Operator

LIMIT = 4096
"""Plans in memory; when there are more, all are forgotten."""

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))
_plans: dict[tuple, Plan] = {}


def plan(op: Operator, bound: tuple) -> Plan:
    """The plan of a call whose arguments are complete; errors as of ``op.plan``."""
    key = form(op, bound)
    if key is None:
        return op.plan(*bound)
    found = _plans.get(key)
    if found is None:
        found = op.plan(*bound)
        if found.lasting and next(_tensors(found), None) is None:
            if len(_plans) >= LIMIT:
                _plans.clear()
            _plans[key] = found
    return found


def forget() -> None:
    """Plan every call anew."""
    _plans.clear()


def form(op: Operator, bound: tuple) -> tuple | None:
    """What the plan of a call depends on, or None where that cannot be said: traced sizes, tensors of other classes."""
    grad = torch.is_grad_enabled()
    parts: list[Any] = [op.name, grad, config.get_token_alignment(), config.num_sms_bound(), config.get_pdl()]
    if not _describe(bound, grad, parts):
        return None
    for at in _written(op):
        _rooms(bound[at], parts)
    return tuple(parts)


@functools.cache
def _written(op: Operator) -> tuple[int, ...]:
    """Positions of the arguments that a call writes: padding rows behind them must be there."""
    return tuple(i for i, parameter in enumerate(op.parameters) if parameter.name in op.mutates)


def _rooms(value: Any, parts: list[Any]) -> None:
    if isinstance(value, (tuple, list)):
        for part in value:
            _rooms(part, parts)
    elif isinstance(value, Tensor):
        parts.append(value.untyped_storage().nbytes() - value.storage_offset() * value.itemsize)


def _describe(values: Iterable[Any], grad: bool, parts: list[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            where = value.get_device(), value.is_meta, value.data_ptr() % WORD
            parts += (value.shape, value.stride(), value.dtype, where, grad and value.requires_grad)
        elif kind in _PLAIN:
            parts += (kind, value)
        elif kind is tuple or kind is list:
            parts += (kind, len(value))
            if not _describe(value, grad, parts):
                return False
        else:
            return False
    return True


def _tensors(plan: Plan) -> Iterator[Tensor]:
    """The tensors that a plan holds: none, unless its launches close over arguments of the call."""
    seen: set[int] = set()
    todo: list[Any] = [plan.outputs, plan.scratch, *(part for x in plan.launches for part in (x.config, x.arguments))]
    while todo:
        value = todo.pop()
        if type(value) in _PLAIN or id(value) in seen or isinstance(value, (type, types.ModuleType, types.CodeType)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, types.FunctionType):
            todo += [cell.cell_contents for cell in value.__closure__ or ()]
            todo += [value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, types.MethodType):
            todo += [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            todo += [value.func, value.args, value.keywords]
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (tuple, list, set, frozenset)):
            todo += value
        else:
            todo += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
            todo += [getattr(value, "__dict__", None)]
