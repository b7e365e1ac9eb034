"""Which load path a tensor allows."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

WORD = 16


def aligned(*tensors: Tensor | None) -> bool:
    """Whether every tensor can be read in 16-byte words: its base and the strides of all but its last dimension.

    Tensors without storage (fake, meta) count by their strides alone.
    """
    return all(address(t) % WORD == 0 and _strides(t) for t in tensors if t is not None)


def _strides(tensor: Tensor) -> bool:
    sizes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(size <= 1 or stride * tensor.itemsize % WORD == 0 for size, stride in sizes)


def address(tensor: Tensor) -> int:
    """Where the data start; 0 for a tensor without storage (fake, meta)."""
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
