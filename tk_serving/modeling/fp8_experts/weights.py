"""FP4 expert weights, their FP8 form, and the workspace that the layers of a model share for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tk_serving.quant import marlin
from tk_serving.quant.per_block_cast_lossless import RAISE
from tk_serving.quant.per_block_cast_lossless_from_marlin import BLOCK, exact, per_block_cast_lossless_from_marlin


@dataclass(frozen=True)
class Fp8Weights:
    """Weights of E experts in blocks of 128 x 128.

    Attributes:
        w13: float8_e4m3fn [E, 2 I, H], gate above up.
        w13_sf: float32 [E, 2 I / 128, H / 128].
        w2: float8_e4m3fn [E, H, I].
        w2_sf: float32 [E, H / 128, I / 128].
    """

    w13: Tensor
    w13_sf: Tensor
    w2: Tensor
    w2_sf: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.w13_sf, self.w2, self.w2_sf))


@dataclass(frozen=True)
class Fp4Weights:
    """Weights of E experts as an engine repacked them for Marlin (:mod:`tk_serving.quant.marlin`).

    Attributes:
        w13: int32 [E, H / 16, 4 I].
        w13_sf: one byte [E, H / 32, 2 I].
        w2: int32 [E, I / 16, 2 H].
        w2_sf: one byte [E, I / 32, H].
    """

    w13: Tensor
    w13_sf: Tensor
    w2: Tensor
    w2_sf: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.w13_sf, self.w2, self.w2_sf))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, 2 I, H)."""
        return self.w13.shape[0], self.w13.shape[2] // 2, self.w13.shape[1] * marlin.TILE_K

    def refusal(self) -> str | None:
        """Why these weights cannot become FP8, or None. Reads the scales, and codes where they decide."""
        reason = self.refusal_of_shape()
        if reason is not None:
            return reason
        if all(exact(codes, sf.view(torch.uint8)) for codes, sf in ((self.w13, self.w13_sf), (self.w2, self.w2_sf))):
            return None
        return "block scales span more than FP8 holds exactly"

    def refusal_of_shape(self) -> str | None:
        """The part of :meth:`refusal` that needs no values."""
        for name, codes, sf in (("w13", self.w13, self.w13_sf), ("w2", self.w2, self.w2_sf)):
            if codes.dtype != torch.int32 or codes.dim() != 3 or sf.dim() != 3 or sf.element_size() != 1:
                return f"{name} is not FP4 in Marlin's layout"
            n, k = codes.shape[2] // 2, codes.shape[1] * marlin.TILE_K
            if tuple(sf.shape) != (codes.shape[0], k // marlin.GROUP, n):
                return f"{name} has scales of shape {list(sf.shape)}"
            if n % BLOCK or k % BLOCK:
                return f"{name} of {n} x {k} is not made of blocks of {BLOCK} x {BLOCK}"
            if name == "w2" and k == BLOCK:
                return f"the intermediate size of this rank is {BLOCK}"  # one scale a row: no column-major layout
        return None


class Layer:
    """One layer's weights; made by :meth:`Layers.add`."""

    def __init__(self, fp4: Fp4Weights, room: _Room) -> None:
        self.fp4 = fp4
        self.w13_sf = marlin.block_scales(fp4.w13_sf, RAISE)
        self.w2_sf = marlin.block_scales(fp4.w2_sf, RAISE)
        self._room = room

    def acquire(self) -> Fp8Weights:
        """The FP8 weights, upcast now on the current stream unless they are there; valid until :meth:`release`."""
        return self._room.acquire(self)

    def release(self) -> None:
        """Call once the last kernel that reads the weights is launched."""
        self._room.release()

    def upcast(self, w13: Tensor, w2: Tensor) -> None:
        """Write the FP8 values, on the current stream."""
        fp4 = self.fp4
        per_block_cast_lossless_from_marlin((fp4.w13, fp4.w13_sf.view(torch.uint8)), self.w13_sf, w13)
        per_block_cast_lossless_from_marlin((fp4.w2, fp4.w2_sf.view(torch.uint8)), self.w2_sf, w2)


class _Room:
    """Memory for the FP8 weights of one layer at a time.

    Streams take turns: each waits for the last reader. Within a CUDA graph every acquisition upcasts; as a replay
    changes the content unseen, what the room holds is not relied on from then on.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        experts, width, hidden = shape
        self._w13 = torch.empty(experts, width, hidden, dtype=torch.float8_e4m3fn, device=device)
        self._w2 = torch.empty(experts, hidden, width // 2, dtype=torch.float8_e4m3fn, device=device)
        self._holds: Layer | None = None
        self._captured = False
        self._read: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return self._w13.numel() + self._w2.numel()

    def acquire(self, layer: Layer) -> Fp8Weights:
        capturing = self._capturing()
        self._captured |= capturing
        if self._read is not None and not capturing:
            torch.cuda.current_stream(self._w13.device).wait_event(self._read)
        if self._captured or self._holds is not layer:
            layer.upcast(self._w13, self._w2)
            self._holds = layer
        return Fp8Weights(self._w13, layer.w13_sf, self._w2, layer.w2_sf)

    def release(self) -> None:
        if self._w13.is_cuda and not self._capturing():
            self._read = torch.cuda.current_stream(self._w13.device).record_event()

    def _capturing(self) -> bool:
        return self._w13.is_cuda and torch.cuda.is_current_stream_capturing()


class _OwnRoom(_Room):
    """The memory of a single layer: filled once, only read from then on."""

    def acquire(self, layer: Layer) -> Fp8Weights:
        if self._holds is None:
            layer.upcast(self._w13, self._w2)
            self._holds = layer
        return Fp8Weights(self._w13, layer.w13_sf, self._w2, layer.w2_sf)

    def release(self) -> None:
        pass


class Layers:
    """The expert layers of a model on one device.

    Args:
        mode: ``upcast`` (one workspace for all layers of a shape) or ``resident`` (FP8 weights of every layer).
    """

    def __init__(self, mode: str = "upcast") -> None:
        self.mode = mode
        self.refused: dict[str, int] = {}
        """How many layers stay as they are, by reason."""
        self.extra_bytes = 0
        """Memory that the FP8 weights take beside the FP4 ones."""
        self.warm = False
        """For the engine's adapter: whether the kernels have been brought into memory."""
        self._shared: dict[tuple, _Room] = {}

    def add(self, weights: Fp4Weights) -> Layer | str:
        """One more layer, or why its weights cannot become FP8. The memory is allocated here, once for ``upcast``."""
        reason = weights.refusal()
        if reason is not None:
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return reason
        if self.mode == "resident":
            room: _Room = _OwnRoom(weights.shape, weights.w13.device)
            self.extra_bytes += room.num_bytes
            layer = Layer(weights, room)
            layer.acquire()
            return layer
        key = (*weights.shape, weights.w13.device)
        if key not in self._shared:
            self._shared[key] = _Room(weights.shape, weights.w13.device)
            self.extra_bytes += self._shared[key].num_bytes
        return Layer(weights, self._shared[key])
