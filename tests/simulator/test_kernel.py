"""Simulated kernels on CPU tensors: layouts, types, launches, options, dispatch."""

import pytest
import tilelang.language as T  # noqa: N812  the custom of TileLang
import torch

from tk_serving import dispatch, simulator
from tk_serving.config import settings
from tk_serving.operator import find
from tk_serving.plan import Launch, Out, Plan
from tk_serving.simulator import Kernel, SimulationError
from tk_serving.simulator.kernel import rows
from tk_serving.workloads import Maker


def strided_copy(dtype: str = "float32", columns: int = 24):
    m, s, r = T.dynamic("m"), T.dynamic("s", "int64"), T.dynamic("r", "int64")

    @T.prim_func
    def copy(
        X: T.StridedTensor((m, columns), (s, 1), dtype),
        Y: T.StridedTensor((m, columns), (1, r), dtype),
    ):
        with T.Kernel(m, threads=32) as b:
            t = T.get_thread_binding()
            if t < columns:
                Y[b, t] = X[b, t]

    return copy


@pytest.fixture(scope="module")
def copy():
    return Kernel("copy", strided_copy())


def test_strided_views_and_padded_storage(copy):
    wide = torch.randn(5, 40)
    storage = torch.full((24 * 8,), -1.0)
    out = storage.as_strided((5, 24), (1, 8))
    copy(wide[:, 3:27], out)
    assert torch.equal(out, wide[:, 3:27])
    assert (storage.view(24, 8)[:, 5:] == -1).all()


def test_row_stride_beyond_32_bits(copy):
    far = torch.empty(2**31 + 64, dtype=torch.float32).as_strided((2, 24), (2**31 + 8, 1))
    far.copy_(torch.randn(2, 24))
    out = torch.empty(24, 2).t()
    copy(far, out)
    assert torch.equal(out, far)


def test_a_view_bounds_the_accesses(copy):
    # The row behind the view exists in memory but does not belong to the argument.
    edited = Kernel("copy", strided_copy(), lambda cuda: cuda.replace("X[", "X[s + "))
    with pytest.raises(SimulationError, match="past the end of X"):
        edited(torch.randn(6, 24)[:5], torch.empty(24, 5).t())
    edited = Kernel("copy", strided_copy(), lambda cuda: cuda.replace("X[", "X[1 + "))
    with pytest.raises(SimulationError, match="between the rows of X"):
        edited(torch.randn(6, 40)[:, :24], torch.empty(24, 6).t())


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4), (1, 0, 48)),
        (torch.zeros(3, 8)[:, :4], (3, 32, 16)),
        (torch.zeros(4, 3).t(), (1, 0, 48)),
        (torch.zeros(64).as_strided((3, 4), (1, 16)), (4, 64, 12)),
        (torch.zeros(2, 3, 8, dtype=torch.int8)[:, :, :4], (2, 24, 20)),
        (torch.zeros(1).expand(5), (1, 0, 4)),
        (torch.zeros(7, 5)[:, 2], (7, 20, 4)),
    ],
)
def test_rows(tensor, expected):
    assert rows(tensor) == (tensor.data_ptr(), *expected)


def test_several_kernels_in_one_function():
    n = T.dynamic("n")

    @T.prim_func
    def twice(X: T.Tensor((n,), "int32"), Y: T.Tensor((n,), "int32"), Z: T.Tensor((n,), "int32"), factor: T.int32):
        with T.Kernel(T.ceildiv(n, 64), threads=64) as b:
            t = T.get_thread_binding()
            if b * 64 + t < n:
                Y[b * 64 + t] = X[b * 64 + t] * factor
        with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
            t = T.get_thread_binding()
            if b * 32 + t < n:
                Z[b * 32 + t] = Y[n - 1 - b * 32 - t] + 1

    x = torch.arange(100, dtype=torch.int32)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    Kernel("twice", twice)(x, y, z, 3)
    assert torch.equal(y, x * 3)
    assert torch.equal(z, y.flip(0) + 1)


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int8",
        "uint8",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
    ],
)
def test_dtypes(dtype):
    @T.prim_func
    def move(X: T.Tensor((256,), dtype), Y: T.Tensor((256,), dtype)):
        with T.Kernel(1, threads=128):
            buffer = T.alloc_shared((256,), dtype)
            t = T.get_thread_binding()
            for i in T.vectorized(2):
                buffer[t * 2 + i] = X[t * 2 + i]
            T.sync_threads()
            for i in T.serial(2):
                Y[i * 128 + t] = buffer[i * 128 + t]

    kind = getattr(torch, dtype)
    codes = (torch.arange(256) % (2 if dtype == "bool" else 256)).to(torch.uint8)
    x = codes.view(kind) if kind.itemsize == 1 else codes.to(kind)
    out = torch.zeros(256, dtype=torch.uint8).view(kind) if kind.itemsize == 1 else torch.zeros(256, dtype=kind)
    Kernel("move", move)(x, out)
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))


def test_deep_stacks_and_a_full_block():
    size = 12 * 1024

    @T.prim_func
    def deep(Y: T.Tensor((1024,), "float32")):
        with T.Kernel(1, threads=1024):
            t = T.get_thread_binding()
            local = T.alloc_local((size,), "float32")
            for i in T.serial(size):
                local[i] = T.cast(t, "float32")
            T.sync_threads()
            Y[t] = local[(t * 11) % size]

    out = torch.zeros(1024)
    Kernel("deep", deep)(out)
    assert torch.equal(out, torch.arange(1024, dtype=torch.float32))


def test_large_dynamic_shared_memory():
    def function(kib):
        @T.prim_func
        def big(X: T.Tensor((32,), "float32"), Y: T.Tensor((32,), "float32")):
            with T.Kernel(1, threads=32):
                buffer = T.alloc_shared((kib * 8, 32), "float32")
                t = T.get_thread_binding()
                for i in T.serial(kib * 8):
                    buffer[i, t] = X[t] + T.cast(i, "float32")
                T.sync_threads()
                Y[t] = buffer[kib * 8 - 1, 31 - t]

        return big

    x, out = torch.zeros(32), torch.zeros(32)
    Kernel("big", function(224))(x, out)
    assert (out == 224 * 8 - 1).all()
    with pytest.raises(SimulationError, match="bytes of shared memory"):
        Kernel("big", function(240))(x, out)


def test_two_and_three_dimensional_grids_and_blocks():
    @T.prim_func
    def where(Y: T.Tensor((2, 3, 4, 2, 32), "int32")):
        with T.Kernel(4, 3, 2, threads=(32, 2)) as (x, y, z):
            tx, ty = T.get_thread_binding(0), T.get_thread_binding(1)
            Y[z, y, x, ty, tx] = tx + 100 * ty + 1000 * x + 10000 * y + 100000 * z

    out = torch.zeros(2, 3, 4, 2, 32, dtype=torch.int32)
    Kernel("where", where)(out, options=simulator.Options(fiber_seed=1))
    z, y, x, ty, tx = torch.meshgrid(*[torch.arange(n) for n in out.shape], indexing="ij")
    assert torch.equal(out, (tx + 100 * ty + 1000 * x + 10000 * y + 100000 * z).int())


def test_arguments_of_the_wrong_kind():
    kernel = Kernel("copy", strided_copy())
    with pytest.raises(TypeError, match="copy: expected tensors and numbers, got str"):
        kernel("x", None)
    with pytest.raises(ValueError, match="copy: expected CPU tensors, got meta"):
        kernel(torch.zeros(5, 24, device="meta"), torch.zeros(24, 5).t())


def test_unwritten_outputs_and_scratch_are_poisoned(monkeypatch):
    plan = Plan(
        (Out((4,), torch.float32), Out((4,), torch.int32), Out((2, 3), torch.float8_e4m3fn, (1, 4), 12)),
        scratch=(Out((2,), torch.bfloat16),),
    )
    buffers = [o.zeros(torch.device("cpu")) for o in (*plan.outputs, *plan.scratch)]
    simulator.run(plan, buffers, ())
    assert buffers[0].isnan().all()
    assert (buffers[1].view(torch.uint8) == 0xA5).all()
    assert buffers[2].as_strided((12,), (1,)).float().isnan().all()
    assert buffers[3].isnan().all()
    with simulator.options(poison=False):
        buffers[0].zero_()
        simulator.run(plan, buffers, ())
    assert (buffers[0] == 0).all()


def test_padding_of_allocated_storage_may_be_written():
    storage = torch.zeros(24 * 8)
    out = storage.as_strided((5, 24), (1, 8))
    beyond = Kernel("copy", strided_copy(), lambda cuda: cuda.replace("Y[", "Y[1 + "))
    with pytest.raises(SimulationError, match="writes 4 bytes between the rows of Y"):
        beyond(torch.randn(5, 24), out)
    beyond(torch.randn(5, 24), out, whole=[out])


def test_cpu_setting_chooses_the_simulator(monkeypatch):
    op = find("topk_gate")
    monkeypatch.setattr(settings, "cpu", "simulator")
    dispatch.reset_counters()
    args = op.inputs(Maker("cpu"), **op.cases[1])
    with simulator.options(fiber_seed=4):
        got = op.public(*args)
    assert torch.equal(got, op.call("reference", *args))
    assert [(row["implementation"], row["calls"]) for row in dispatch.counters()] == [("simulator", 1)]


def test_kernels_are_loaded_once():
    launch = Launch("moe.topk_gate", {"num_experts": 8, "num_topk": 2}, lambda *_: ())
    again = Launch("moe.topk_gate", {"num_topk": 2, "num_experts": 8}, lambda *_: ())
    assert simulator.load(launch) is simulator.load(again)


def test_options_are_restored():
    def fail():
        with simulator.options(fiber_seed=1, poison=False):
            assert simulator._options == simulator.Options(fiber_seed=1, poison=False)
            raise RuntimeError("inside")

    before = simulator._options
    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert simulator._options is before
