"""Inputs of one row: the first set from the operator's declaration, further sets as copies in memory of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.selection import Task
from tk_serving.workloads import Maker


class Inputs:
    """The argument tuples of a row; set i is made when it is first asked for."""

    def __init__(self, task: Task, device: torch.device | str) -> None:
        self._op = task.op
        made = task.op.inputs(Maker(device), tokens=task.tokens, **task.params)
        self._pristine = task.op.bind(*made)  # never passed to a call: some write to their arguments
        self._sets: list[tuple] = []

    def __getitem__(self, index: int) -> tuple:
        while len(self._sets) <= index:
            self._sets.append(self.fresh())
        return self._sets[index]

    def fresh(self) -> tuple:
        """A set that nobody else uses."""
        return copy_arguments(self._pristine)

    def by_name(self, args: tuple) -> dict[str, Any]:
        return dict(zip(self._op.signature.parameters, args, strict=True))


def copy_arguments(args: Any) -> Any:
    """Nested arguments, every tensor in new memory: same strides and offsets, views of one buffer still share one."""
    storages: dict[int, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _copy(value, storages)
        if isinstance(value, (tuple, list)):
            return type(value)(walk(item) for item in value)
        return value

    return walk(args)


def _copy(tensor: Tensor, storages: dict[int, Tensor]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor.clone()
    base = storages.get(storage.data_ptr())
    if base is None:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        base = storages[storage.data_ptr()] = whole.clone()
    target = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return target.set_(base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
