"""Which load path a tensor allows."""

from torch import Tensor

WORD = 16


def aligned(*tensors: Tensor | None) -> bool:
    """Whether every tensor can be read in 16-byte words: its base and the strides of all but its last dimension.

    Tensors without storage (fake, meta) count by their strides alone.
    """
    return all(_address(t) % WORD == 0 and _strides(t) for t in tensors if t is not None)


def _strides(tensor: Tensor) -> bool:
    sizes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(size <= 1 or stride * tensor.itemsize % WORD == 0 for size, stride in sizes)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a fake tensor
        return 0
