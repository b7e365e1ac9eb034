"""What one call of an operator allocates and launches, decided from metadata alone."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tk_serving.compile.targets import ARCHS
from tk_serving.config import get_pdl


@dataclass(frozen=True)
class Out:
    """A tensor to allocate: shape, dtype and, where not row-major, strides.

    With ``storage`` the tensor is a view of a larger allocation (padding rows of TMA-aligned scales); the
    implementation that runs must define every stored element, padding included.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    storage: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        if self.storage is None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return torch.empty(self.storage, dtype=self.dtype, device=device).as_strided(self.shape, self.strides)

    def zeros(self, device: torch.device) -> Tensor:
        out = self.empty(device)
        whole = out if self.storage is None else out.as_strided((self.storage,), (1,))
        _zero(whole)
        return out


@dataclass(frozen=True)
class Existing:
    """A result that the caller owns: the named argument, or one half (``index``) of a pair argument."""

    argument: str
    index: int | None = None


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor that takes the place of an allocation, with the padding rows behind it; made by :meth:`Plan.into`."""

    tensor: Tensor
    storage: int | None = None

    def zero_padding(self) -> None:
        """Zero the tensor and its padding rows, if it has any."""
        if self.storage is not None:
            _zero(self.tensor.as_strided((self.storage,), (1,)))


def _zero(tensor: Tensor) -> None:
    # As bytes: fill_ is not implemented for every 1-byte float on every device.
    (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).zero_()


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: ``"<family>.<file>"`` or ``"<family>.<file>:<builder>"`` below the family's ``kernels`` folder; the
            builder (``build`` by default) returns a TileLang ``prim_func``.
        config: compile-time arguments of the builder; two launches with equal kernel and config share one binary.
        arguments: ``arguments(outputs, *public arguments)`` gives the run-time arguments of the ``prim_func``;
            ``outputs`` are the plan's outputs followed by its scratch tensors.
        archs: the architectures that the kernel is for.
        pdl: whether it uses programmatic dependent launch (:mod:`tk_serving.compile.pdl`); never if that is switched
            off.
        trigger_last: with it, the next launch may begin only when this one has done its work, not at once: for
            work whose time is that of one thread after another, which what is launched beside it makes longer.
    """

    kernel: str
    config: dict[str, Any]
    arguments: Callable[..., Sequence[Any]]
    archs: tuple[str, ...] = ARCHS
    pdl: bool = True
    trigger_last: bool = False
    key: tuple = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pdl", self.pdl and get_pdl())
        early = "last" if self.pdl and self.trigger_last else self.pdl
        object.__setattr__(self, "key", (self.kernel, *sorted(self.config.items()), ("pdl", early)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Launch) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{k}={v}' for k, v in self.config.items())})"

    @property
    def builder(self) -> Callable[..., Any]:
        family, _, rest = self.kernel.partition(".")
        file, _, function = rest.partition(":")
        return getattr(importlib.import_module(f"tk_serving.{family}.kernels.{file}"), function or "build")

    def prim_func(self) -> Any:
        """The TileLang function for this configuration. Imports TileLang."""
        return self.builder(**self.config)


def early_below(size: int, limit: int) -> bool:
    """Whether a launch of that size is early (``pdl``), where those from ``limit`` on take longer so.

    A traced size counts as below: nothing is launched, and a graph must not depend on it.
    """
    return isinstance(size, torch.SymInt) or size < limit


@dataclass(frozen=True)
class Plan:
    """What a call does.

    Attributes:
        outputs: one entry for each tensor of the declared return type: to allocate, caller-owned, or None (absent).
        launches: kernels in launch order; empty when there is no work (zero tokens): outputs are then zero-filled.
        scratch: temporaries that the launches share.
        refusal: why no kernel can run this call although the contract allows it; the reference runs instead.
        lasting: whether it follows from the form of the call alone, so that it may be kept (:mod:`tk_serving.kept`).
        loaded: the kernels of the launches, by the device on which they ran.
    """

    outputs: tuple[Out | Existing | Given | None, ...]
    launches: tuple[Launch, ...] = ()
    scratch: tuple[Out, ...] = ()
    refusal: str | None = None
    lasting: bool = True
    loaded: dict[int, tuple[Callable[..., Any], ...]] = field(default_factory=dict, compare=False, repr=False)

    def into(self, tensors: Sequence[Tensor | None]) -> Plan:
        """The same call writing to these tensors instead of allocating.

        Raises:
            ValueError: a tensor differs from the allocation in shape, dtype or strides, or its storage ends before the
                padding rows that the allocation has.
        """
        outputs: list[Out | Existing | Given | None] = []
        for i, (slot, tensor) in enumerate(zip(self.outputs, tensors, strict=True)):
            if not isinstance(slot, Out) or tensor is None:
                outputs.append(slot)
                continue
            if tensor.dtype != slot.dtype or tuple(tensor.shape) != tuple(slot.shape):
                same = False
            elif slot.strides is None:
                same = tensor.is_contiguous()
            else:
                same = all(a == b for a, b, n in zip(slot.strides, tensor.stride(), slot.shape, strict=True) if n > 1)
            if not same:
                layout = "contiguous" if slot.strides is None else f"strides {list(slot.strides)}"
                raise ValueError(
                    f"into: output {i}: expected {slot.dtype} {list(slot.shape)} {layout}, "
                    f"got {tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())}"
                )
            if slot.storage is not None:
                room = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
                if room < slot.storage:
                    expected = f"storage of {slot.storage} elements, padding rows included"
                    raise ValueError(f"into: output {i}: expected {expected}, got {room}")
            outputs.append(Given(tensor, slot.storage))
        return replace(self, outputs=tuple(outputs))
