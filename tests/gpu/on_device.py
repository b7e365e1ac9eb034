"""What the tests on a GPU share: which device they need, and comparing results bit for bit."""

import pytest
import torch

from tk_serving import dispatch

GIB = 1 << 30


def needs_device(gib: int = 0) -> list[pytest.MarkDecorator]:
    """Marks of a module that runs kernels, on a device with this much memory in GiB."""
    missing = (
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() < dispatch.MIN_CAPABILITY
        or torch.cuda.get_device_properties(0).total_memory < gib * GIB
    )
    reason = "needs a CUDA device of compute capability 9.0 or higher" + (f" with {gib} GiB" if gib else "")
    return [pytest.mark.gpu, pytest.mark.skipif(missing, reason=reason)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().view(torch.uint8)


def tensors(results):
    """The tensors of a result, those of nested tuples among them, without what is None."""
    if isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, (tuple, list)):
        for result in results:
            yield from tensors(result)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that two tensors have shape, dtype and bits in common, and that something was written."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.equal(bits(a), bits(b))
    assert bits(a).any(), "nothing was written"
