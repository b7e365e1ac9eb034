"""One simulated kernel: its library, its calls, and readable messages for its faults."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tk_serving.simulator import source, toolchain
from tk_serving.simulator.arguments import Packed
from tk_serving.simulator.errors import SimulationError

lock = threading.RLock()  # one launch at a time: the scheduler is global


@dataclass(frozen=True)
class Options:
    fiber_seed: int | None = None
    poison: bool = True


@functools.cache
def _scheduler(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.sim_error.restype = ctypes.c_char_p
    library.sim_configure.argtypes = [ctypes.c_long]
    library.sim_add_argument.argtypes = [ctypes.c_char_p, ctypes.c_void_p, *[ctypes.c_size_t] * 3]
    return library


class Kernel:
    """A TileLang function that runs on CPU tensors.

    Args:
        name: stands in messages and in the cache.
        prim_func: the TileLang function.
        edit: changes the generated CUDA before it is built; tests seed faults with it.
    """

    def __init__(self, name: str, prim_func: Any, edit: Callable[[str], str] | None = None) -> None:
        self.name = name
        self.parameters = [str(p.name).removesuffix("_handle") for p in prim_func.params]
        generated = source.generate(prim_func)
        if edit is not None:
            generated = generated.edited(edit)
        self.cuda = generated.cuda
        self._path = toolchain.build(name, source.device_unit(name, generated), source.host_unit(generated))
        self._scheduler = _scheduler(toolchain.common() / "libscheduler.so")
        self._library = ctypes.CDLL(str(self._path))
        self._entry = self._library[f"__tvm_ffi_{generated.entry}"]
        self._entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]

    def __call__(self, *values: Any, options: Options | None = None, whole: Sequence[Tensor] = ()) -> None:
        """Launch with the run-time arguments of the function.

        Args:
            values: CPU tensors and numbers.
            options: see :func:`tk_serving.simulator.options`.
            whole: tensors of which the kernel may write the whole storage, not just the elements of the view.
        """
        options = options or Options()
        packed = Packed(self.name, values)
        with lock:
            self._scheduler.sim_configure(-1 if options.fiber_seed is None else options.fiber_seed)
            self._scheduler.sim_clear_arguments()
            storages = {t.untyped_storage().data_ptr() for t in whole}
            for name, value in zip(self.parameters, values, strict=False):
                if isinstance(value, Tensor) and value.numel():
                    storage = value.untyped_storage()
                    extent = (
                        (storage.data_ptr(), 1, 0, storage.nbytes()) if storage.data_ptr() in storages else rows(value)
                    )
                    self._scheduler.sim_add_argument(name.encode(), *extent)
            if self._entry(None, packed.array, len(values), (ctypes.c_char * 64)()):
                message = self._scheduler.sim_error().decode(errors="replace")
                raise SimulationError(f"{self.name}: {self._readable(message)}")

    def _readable(self, message: str) -> str:
        """The message with return addresses and lines of the CUDA text replaced by that text."""
        message = re.sub(r"\[at (0x[0-9a-f]+)\]", lambda m: f"[in {self._line_of(int(m[1], 16))}]", message)
        lines = self.cuda.splitlines()

        def quote(match: re.Match[str]) -> str:
            number = int(match[1])
            return f"line {number}: `{lines[number - 1].strip()}`" if 0 < number <= len(lines) else match[0]

        return re.sub(rf"{re.escape(self.name)}\.cu:(\d+)", quote, message)

    def _line_of(self, address: int) -> str:
        """``file:line`` of a return address, where inlined the line of the kernel itself."""
        base = ctypes.c_void_p.in_dll(self._library, "sim_image").value or 0
        command = ["addr2line", "-i", "-e", str(self._path), hex(address - base - 1)]
        try:
            found = subprocess.run(command, capture_output=True, text=True).stdout.split()
        except FileNotFoundError:
            return hex(address)
        places = [Path(place).name for place in found if ":" in place]
        return next(
            (place for place in places if place.startswith(f"{self.name}.cu:")), places[0] if places else hex(address)
        )


def rows(tensor: Tensor) -> tuple[int, int, int, int]:
    """(address, rows, bytes from row to row, bytes of a row) of a strided tensor: the bytes that belong to it.

    Rows follow the largest stride; what lies between the elements of one row counts as part of it.
    """
    size = tensor.element_size()
    dims = sorted(((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s > 0), reverse=True)
    inner = 1 + sum(stride * (n - 1) for stride, n in dims[1:])
    if not dims or dims[0][0] <= inner:
        total = 1 + sum(stride * (n - 1) for stride, n in dims)
        return tensor.data_ptr(), 1, 0, total * size
    return tensor.data_ptr(), dims[0][1], dims[0][0] * size, inner * size
