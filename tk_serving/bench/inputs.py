"""Inputs of one row: the first set from the operator's declaration, further sets as copies in memory of their own.

What takes a large part of a device and is never written, such as the weights of all experts, has no second copy that
only a comparison needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from tk_serving.bench.selection import Task
from tk_serving.operator import tensors_of
from tk_serving.workloads import Maker

LARGE = 1 << 30
"""Bytes of a storage that comparisons share."""


class Inputs:
    """The argument tuples of a row; set i is made when it is first asked for."""

    def __init__(self, task: Task, device: torch.device | str) -> None:
        self._op = task.op
        made = task.op.inputs(Maker(device), tokens=task.tokens, **task.params)
        self._pristine = task.op.bind(*made)  # never passed to a call: some write to their arguments
        written = {place for name in task.op.mutates for place, _ in _storages(self.by_name(self._pristine)[name])}
        self._shared = {place for place, size in _storages(self._pristine) if size > LARGE and place not in written}
        self._sets: list[tuple] = []

    def __getitem__(self, index: int) -> tuple:
        while len(self._sets) <= index:
            self._sets.append(self.fresh() if not self._sets else copy_arguments(self._pristine))
        return self._sets[index]

    def fresh(self) -> tuple:
        """A set that nobody else writes to."""
        return copy_arguments(self._pristine, self._shared)

    @property
    def num_bytes(self) -> int:
        """Of a further set."""
        return sum(dict(_storages(self._pristine)).values())

    def by_name(self, args: tuple) -> dict[str, Any]:
        return dict(zip(self._op.signature.parameters, args, strict=True))


def copy_arguments(args: Any, shared: Collection[int] = ()) -> Any:
    """Nested arguments, every tensor in new memory: same strides and offsets, views of one buffer still share one.

    ``shared`` are the addresses of storages that are not copied.
    """
    storages: dict[int, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.untyped_storage().data_ptr() in shared else _copy(value, storages)
        if isinstance(value, (tuple, list)):
            return type(value)(walk(item) for item in value)
        return value

    return walk(args)


def _storages(args: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of the storage of every tensor."""
    for tensor in tensors_of(args):
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()


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
