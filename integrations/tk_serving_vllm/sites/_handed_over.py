"""Rows that a fused operator has quantised already, on their way to the linear layer that takes them.

vLLM's linear layers quantise their input themselves. Where one of our operators wrote the quantised rows together with
the rows, the layer's own cast is left out. The rows are recognised by their memory while their tensor is alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from tk_serving_patches import comparing


@dataclass(frozen=True)
class Cast:
    """How rows are quantised: e4m3 in groups of ``group`` channels.

    Attributes:
        group: channels with one scale.
        column_major: scales lie column by column, each column on a 16-byte boundary.
        round_sf: scales are powers of two.
    """

    group: int
    column_major: bool
    round_sf: bool


@dataclass
class _Parcel:
    rows: weakref.ref[Tensor]
    place: tuple[int, torch.Size]
    cast: Cast
    data: Tensor
    sf: Tensor
    taken: bool = False


_parcels: dict[tuple[torch.device, bool], _Parcel] = {}
"""The last one of each kind: shared experts give hollow rows while another stream's rows are still being read."""


class NotTakenError(RuntimeError):
    """Rows exist only in quantised form, and the layer that they were meant for read something else."""


_offered: dict[torch.device, tuple[weakref.ref[Tensor], tuple[int, torch.Size]]] = {}
_wanted: dict[torch.device, Cast] = {}


def wanted(device: torch.device) -> Cast | None:
    """How the linear layers that read a sublayer's input quantise it, once one of them has; None until then."""
    return _wanted.get(device)


def offer(rows: Tensor) -> None:
    """Say that these rows could have been quantised: a linear layer that quantises them makes its wish known."""
    _offered[rows.device] = (weakref.ref(rows), _place(rows))


def give(rows: Tensor, cast: Cast, data: Tensor, sf: Tensor, hollow: bool = False) -> None:
    """Hand over the quantised form of ``rows``; it is kept until the next one of its kind on the same device.

    It is not freed when it is taken: a layer on another stream may still read it.

    Args:
        rows: bfloat16 [T, H].
        cast: how they were quantised.
        data, sf: the quantised form.
        hollow: ``rows`` itself was never written; the next linear layer must take the quantised form.

    Raises:
        NotTakenError: hollow rows from before were not taken.
    """
    key = (rows.device, hollow)
    before = _parcels.get(key)
    _parcels[key] = _Parcel(weakref.ref(rows), _place(rows), cast, data, sf)
    if hollow and before is not None and not before.taken:
        raise NotTakenError(f"the quantised rows of shape {list(before.place[1])} were not taken by a linear layer")


def take(rows: Tensor, cast: Cast) -> tuple[Tensor, Tensor] | None:
    """The quantised form of ``rows`` (or of a view of the same shape), or None."""
    device, place = rows.device, _place(rows)
    for hollow in (False, True):
        parcel = _parcels.get((device, hollow))
        if parcel is None or parcel.rows() is None or parcel.cast != cast:
            continue
        if parcel.place == place:
            parcel.taken = True
            if hollow:
                comparing.skip()
            return parcel.data, parcel.sf
    if device not in _wanted and device in _offered:
        offered, where = _offered[device]
        if offered() is not None and where == place:
            _wanted[device] = cast
    return None


def forget() -> None:
    """Drop everything that is on its way, and every wish."""
    for state in (_parcels, _offered, _wanted):
        state.clear()


def _place(rows: Tensor) -> tuple[int, torch.Size]:
    return rows.data_ptr(), rows.shape
