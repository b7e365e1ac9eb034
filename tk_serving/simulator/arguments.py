"""CPU tensors and numbers as the packed arguments of TileLang's host code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_CUDA = 2  # DLPack device type: the host code only accepts what it would accept on a GPU

# DLPack type codes
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_DTYPES = {
    torch.bool: (_BOOL, 8, 1),
    torch.uint8: (_UINT, 8, 1),
    torch.uint16: (_UINT, 16, 1),
    torch.uint32: (_UINT, 32, 1),
    torch.uint64: (_UINT, 64, 1),
    torch.int8: (_INT, 8, 1),
    torch.int16: (_INT, 16, 1),
    torch.int32: (_INT, 32, 1),
    torch.int64: (_INT, 64, 1),
    torch.float16: (_FLOAT, 16, 1),
    torch.float32: (_FLOAT, 32, 1),
    torch.float64: (_FLOAT, 64, 1),
    torch.bfloat16: (_BFLOAT, 16, 1),
    torch.float8_e4m3fn: (10, 8, 1),
    torch.float8_e5m2: (12, 8, 1),
    torch.float8_e8m0fnu: (14, 8, 1),
    torch.float4_e2m1fn_x2: (17, 4, 2),
}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Value(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("number", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class _Any(ctypes.Structure):
    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value)]


# Type indices of the TVM FFI
_NONE, _INTEGER, _BOOLEAN, _NUMBER, _TENSOR = 0, 1, 2, 3, 7


class Packed:
    """The arguments of one call; holds everything that the pointers refer to."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        self.array = (_Any * max(1, len(values)))()
        self._alive: list[Any] = []
        for slot, value in zip(self.array, values, strict=False):
            if isinstance(value, Tensor):
                tensor = self._tensor(name, value)
                slot.type_index, slot.value.pointer = _TENSOR, ctypes.addressof(tensor)
            elif value is None:
                slot.type_index = _NONE
            elif isinstance(value, (bool, int)):
                slot.type_index, slot.value.integer = _BOOLEAN if isinstance(value, bool) else _INTEGER, int(value)
            elif isinstance(value, float):
                slot.type_index, slot.value.number = _NUMBER, value
            else:
                raise TypeError(f"{name}: expected tensors and numbers, got {type(value).__name__}")

    def _tensor(self, name: str, tensor: Tensor) -> _DLTensor:
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: expected CPU tensors, got {tensor.device}")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name}: no kernel takes {tensor.dtype}")
        sizes = ctypes.c_int64 * max(1, tensor.dim())
        shape, strides = sizes(*tensor.shape), sizes(*tensor.stride())
        made = _DLTensor(tensor.data_ptr() or None, _CUDA, 0, tensor.dim(), *_DTYPES[tensor.dtype], shape, strides, 0)
        self._alive += [tensor, shape, strides, made]
        return made
