"""The alignments that vLLM's warm-up leaves out: with vLLM's own launchers, and kernels that note them."""

import inspect

import pytest
import torch

from tk_serving.bench.e2e import jit_monitor

cache_utils = pytest.importorskip("vllm.models.deepseek_v4.common.ops.cache_utils")
monitor = pytest.importorskip("vllm.utils.jit_monitor")


class Noting:
    """A Triton kernel that notes what it is launched with and compiled for."""

    def __init__(self, kernel):
        self.arg_names = list(inspect.signature(kernel).parameters)
        self.launched, self.compiled = [], []

    def __getitem__(self, grid):
        return lambda **arguments: self.launched.append(arguments)

    def warmup(self, grid, **arguments):
        self.compiled.append(arguments)

    def pointers(self, *names):
        return {tuple(one[f"{name}_ptr"].aligned for name in names) for one in self.compiled}


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(monitor, "_mode", "warn")
    owners = [cache_utils._DEQUANTIZE_AND_GATHER_K_CACHE_KERNEL, cache_utils._COMBINE_TOPK_SWA_INDICES_KERNEL]
    for owner in owners:
        monkeypatch.setattr(owner, "kernel", Noting(type(owner).kernel), raising=False)
        monkeypatch.setitem(vars(owner), "_kernel_arg_names", tuple(owner.kernel.arg_names))
    assert jit_monitor.watch() == 2
    yield owners
    for owner in owners:
        vars(owner).pop("launch", None)


def rows(*shape, start=0):
    return torch.zeros(shape, dtype=torch.int32)[start:]


def gather(owner, *, first, width=24, gathered=True, offset=0):
    out, cache = torch.zeros(2, 100, 512, dtype=torch.bfloat16), torch.zeros(4, 36864, dtype=torch.uint8)
    owner(out, cache, rows(8, start=first), rows(8) if gathered else None, rows(8, width, start=first), 64, offset)


def combine(owner, *, ratio):
    found = rows(9, 640), rows(9), rows(20, 512, start=3), rows(9, start=2), rows(8, start=2), rows(8)
    owner(*found, 5, 5, TOP_K=512, COMPRESS_RATIO=ratio, WINDOW_SIZE=128)


def test_every_alignment_of_what_was_called_is_compiled(kernels):
    dequantize, combined = kernels
    for first in (0, 1, 2):
        gather(dequantize, first=first)
    combine(combined, ratio=4)
    assert len(dequantize.kernel.launched) == 3
    found = jit_monitor.complete()
    assert found["forms"] == 2
    assert dequantize.kernel.pointers("seq_lens", "gather_lens") == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert dequantize.kernel.pointers("block_table") == {(True,)}  # its rows are multiples of 16 bytes
    assert {one["offset"] for one in dequantize.kernel.compiled} == {1, 2, 16}
    free = combined.kernel.pointers("query_start_loc", "seq_lens", "gather_lens")
    assert len(free) == 8
    assert combined.kernel.pointers("topk_indices") == {(True,)}
    assert all(one["COMPRESS_RATIO"] == 4 for one in combined.kernel.compiled)
    assert len(dequantize.kernel.launched) == 3  # nothing runs


def test_constants_and_missing_tensors_are_told_apart(kernels):
    dequantize, combined = kernels
    gather(dequantize, first=1)
    gather(dequantize, first=1, gathered=False)
    gather(dequantize, first=1, width=23)
    for ratio in (1, 4):
        combine(combined, ratio=ratio)
    assert jit_monitor.complete()["forms"] == 5
    assert any(one["gather_lens_ptr"] is None for one in dequantize.kernel.compiled)
    narrow = [one["block_table_ptr"].aligned for one in dequantize.kernel.compiled if one["max_blocks_per_seq"] == 23]
    assert set(narrow) == {True, False}


def test_the_monitor_is_set_to_error_and_calls_are_no_longer_noted(kernels):
    dequantize, _ = kernels
    assert monitor._mode == "warn"
    assert jit_monitor.complete()["mode"] == "error"
    assert monitor._mode == "error"
    jit_monitor.watch()
    jit_monitor.complete()
    gather(dequantize, first=1)
    assert not jit_monitor._seen
