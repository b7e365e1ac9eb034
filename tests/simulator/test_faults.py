"""Faults of kernels end the launch with a SimulationError that names the kernel, the thread and the line."""

import re

import pytest
import tilelang.language as T  # noqa: N812  the custom of TileLang
import torch

from tk_serving.simulator import Kernel, SimulationError
from tk_serving.simulator.kernel import Options

N = 128


@T.prim_func
def reverse(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=N):
        buffer = T.alloc_shared((N,), "float32")
        t = T.get_thread_binding()
        buffer[t] = X[t]
        Y[t] = buffer[N - 1 - t]


def launch(edit, seed=None, values=None, function=reverse):
    """Run the function with its CUDA changed by (pattern, replacement) pairs."""

    def change(cuda):
        for pattern, replacement in edit:
            cuda, count = re.subn(pattern, replacement, cuda)
            assert count, pattern
        return cuda

    values = values or (torch.arange(N, dtype=torch.float32), torch.zeros(N))
    Kernel("reverse", function, change if edit else None)(*values, options=Options(fiber_seed=seed))
    return values[-1]


def first(statement):
    """An edit that puts a statement at the start of the kernel."""
    return [(r"\) \{\n", ") {\n  " + statement + "\n")]


def test_correct_kernel_runs():
    assert torch.equal(launch([]), torch.arange(N - 1, -1, -1, dtype=torch.float32))
    assert torch.equal(launch([], seed=3), torch.arange(N - 1, -1, -1, dtype=torch.float32))


# mbarrier at address 0, with the first bytes of the buffer.
INIT = (
    'if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%%0], %%1;" :: "r"(0), "r"(%d));'
    " __syncthreads();"
)
ARRIVE = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(0));'
EXPECT = 'asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%%0], %%1;" :: "r"(0), "r"(%d));'
WAIT = (
    "unsigned done;"
    'asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"'
    ' : "=r"(done) : "r"(0), "r"(0));'
)
BULK = (
    'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%%0], [%%1], %%2, [%%3];"'
    ' :: "r"(64), "l"(%s), "r"(%d), "r"(0));'
)

FAULTS = [
    ([(r"  __syncthreads\(\);\n", "")], "race in shared memory: .* thread"),
    (
        first("if (threadIdx.x < 64) __syncthreads();"),
        "barrier divergence|deadlock: threads 0-63 wait at __syncthreads",
    ),
    (
        first("if (threadIdx.x == 5) return;"),
        r"deadlock: threads 0-4,6-127 wait at __syncthreads \(line \d+: `__syncthreads",
    ),
    (first("if (threadIdx.x < 16) __shfl_xor_sync(0xffffffff, 1, 1);"), "deadlock|different operations"),
    (
        first("if (threadIdx.x & 1) __ballot_sync(~0u, 1); else __shfl_sync(~0u, 1, 0);"),
        "lanes of a warp meet in different operations",
    ),
    (first("__syncwarp(0xffff);"), "leaves out its own lane"),
    (first("Y[threadIdx.x + 1] = 0;"), r"thread \(127,0,0\): writes 4 bytes out of bounds: 0 bytes past the end of Y"),
    (first("Y[0] += X[threadIdx.x * 1000000000ll];"), "reads 4 bytes out of bounds: .* past the end of"),
    (first("Y[0] += X[(int)threadIdx.x - 1];"), "reads 4 bytes out of bounds: 4 bytes before X"),
    (first("*(int*)0 = 1;"), "writes 4 bytes"),
    (first("((float4*)(Y + 1))->x = 1;"), "misaligned address: an access of type .*float4.* needs 16 bytes"),
    (first("*(int2*)((char*)X + 4) = int2{1, 2};"), "misaligned address"),
    (
        first("float z[4]; for (int i = 0; i < 4; i++) z[i] = i; Y[0] = z[(int)threadIdx.x];"),
        "index [0-9]+ is out of bounds of a local",
    ),
    (first("Y[0] = 1 << (int)threadIdx.x;"), "shift of .*int.* by [0-9]+"),
    (first("Y[0] = 7 / (int)threadIdx.x;"), "division by zero"),
    (first("Y[0] = (int)(X[threadIdx.x] * 1e30f);"), "conversion of .*float.* to .*int.* out of range"),
    (first('asm volatile("tcgen05.fence;");'), "unknown PTX: tcgen05.fence"),
    (first(INIT % 1 + WAIT), r"deadlock: threads 0-127 wait at an mbarrier \(line \d+: `"),
    (first(INIT % 1 + EXPECT % 16), "more threads arrive at the mbarrier at shared address 0 than it has room for"),
    (first(WAIT), "no mbarrier was initialised at shared address 0"),
    (first(INIT % 128 + BULK % ("X + 1", 16) + "return;"), r"misaligned address: cp\.async\.bulk of 16 bytes"),
    (first(INIT % 128 + BULK % ("X + 124", 32) + "return;"), "reads 16 bytes out of bounds: 0 bytes past the end of X"),
    (first("__activemask();"), "__activemask"),
    (first("__trap();"), "__trap"),
    (first("while (((volatile float*)X)[0] == 0) {}"), "a loop that does not end, or that waits for another block"),
    (
        first('asm volatile("bar.sync %0, %1;" :: "r"(threadIdx.x < 64 ? 1 : 2), "r"(128));'),
        "deadlock: .*barrier 1.*barrier 2",
    ),
    (first('asm volatile("bar.sync %0, %1;" :: "r"(1), "r"(100));'), "barrier 1 for 100 of 128 threads"),
]


@pytest.mark.parametrize(("edit", "message"), FAULTS, ids=[f[1][:40] for f in FAULTS])
@pytest.mark.parametrize("seed", [None, 1])
def test_fault(edit, message, seed):
    with pytest.raises(SimulationError, match=rf"^reverse: [\s\S]*({message})") as caught:
        launch(edit, seed)
    assert "[at 0x" not in str(caught.value)


def test_message_quotes_the_line():
    with pytest.raises(SimulationError, match=r"line \d+: `Y\[threadIdx.x \+ 1\] = 0;`"):
        launch(first("Y[threadIdx.x + 1] = 0;"))


def test_the_process_survives_a_fault():
    for _ in range(3):
        with pytest.raises(SimulationError):
            launch(first("if (threadIdx.x == 5) return;"))
        assert launch([])[0] == N - 1


def test_overwritten_before_it_is_read():
    # Thread order hides this race: every thread but the reader's neighbour has the old value.
    edit = [(r"\n(  buffer\[.*);\n", r"\n for (int r = 0; r < 2; r++) {\n\1 + r;\n"), (r"\n\}\s*$", "\n }\n}\n")]
    with pytest.raises(SimulationError, match="race in shared memory"):
        launch(edit)


def test_same_value_is_no_race():
    edit = [(r"\n  (buffer)\[", r"\n  \1[0] = 5;\n  if (\1[0] != 5) __trap();\n  __syncthreads();\n  \1[")]
    launch(edit)
    launch(edit, seed=7)


def test_syncwarp_orders_the_lanes_of_a_warp():
    store = r"\n  (buffer)\[.*;\n"
    swap = (
        r"\n  \1[threadIdx.x] = X[threadIdx.x];\n  %s float v = \1[threadIdx.x ^ 1];\n  __syncthreads();"
        r"\n  \1[threadIdx.x] = v;\n"
    )
    assert launch([(store, swap % "__syncwarp();")])[0] == 126
    with pytest.raises(SimulationError, match="race"):
        launch([(store, swap % "")])
    # A shuffle exchanges registers; it does not order memory.
    with pytest.raises(SimulationError, match="race"):
        launch([(store, swap % "__shfl_xor_sync(~0u, 1, 1);")])


def test_unwritten_shared_memory_is_nan():
    out = launch([(r"\n  (buffer)\[", r"\n  if (threadIdx.x != 7) \1[")])
    assert out[N - 1 - 7].isnan()
    assert int(out.isnan().sum()) == 1


def test_unwritten_local_array_is_garbage():
    out = launch(first("\n  float z[4];\n  if (X[0] > 5) z[1] = 3; Y[threadIdx.x] = z[1]; return;"))  # X[0] is 0
    assert out.isnan().all()


def test_async_copy_arrives_when_waited_for():
    copy = (
        "__shared__ __align__(16) float s[4];"
        " if (threadIdx.x == 0) { tl::cp_async_gs<16>(s, X + 4); tl::cp_async_commit(); %s }"
        " __syncthreads(); Y[threadIdx.x] = s[threadIdx.x & 3]; return;"
    )
    assert launch(first(copy % "tl::cp_async_wait<0>();"))[:4].tolist() == [4, 5, 6, 7]
    assert launch(first(copy % "tl::cp_async_wait<1>();"))[:4].isnan().all()
    with pytest.raises(SimulationError, match=r"misaligned address: cp\.async"):
        launch(first((copy % "tl::cp_async_wait<0>();").replace("X + 4", "X + 5")))


def test_an_mbarrier_waits_for_arrivals_and_bytes():
    leader = (
        "if (threadIdx.x == 64) { "
        + EXPECT % 256
        + BULK % ("X", 256)
        + " } else if (threadIdx.x < 64) { "
        + ARRIVE
        + " }"
    )
    read = " Y[threadIdx.x] = ((float*)((char*)sim::dynamic_shared() + 64))[threadIdx.x % 64]; return;"
    for seed in (None, 4):
        out = launch(first(INIT % 65 + leader + WAIT + read), seed)
        assert torch.equal(out, torch.arange(64, dtype=torch.float32).repeat(2))
    with pytest.raises(SimulationError, match="race in shared memory"):
        launch(first(INIT % 65 + leader + read))


def test_random_order_finds_a_race_between_blocks():
    @T.prim_func
    def last_wins(X: T.Tensor((N,), "float32"), Y: T.Tensor((1,), "float32")):
        with T.Kernel(N, threads=32) as b:
            if T.get_thread_binding() == 0:
                Y[0] = X[b]

    x = torch.arange(N, dtype=torch.float32)
    found = {launch([], seed, (x, torch.zeros(1)), last_wins).item() for seed in (None, 1, 2, 3)}
    assert len(found) > 1
    again = [launch([], 5, (x, torch.zeros(1)), last_wins).item() for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((torch.zeros(N - 1), torch.zeros(N)), "input X shape"),
        ((torch.zeros(N, dtype=torch.float64), torch.zeros(N)), "input X dtype"),
        ((torch.zeros(N, 2)[:, 0], torch.zeros(N)), "input X strides"),
        ((torch.zeros(N),), "num_args"),
    ],
)
def test_host_code_checks_the_arguments(values, message):
    with pytest.raises(SimulationError, match=f"^reverse: .*{message}"):
        Kernel("reverse", reverse)(*values)


def test_empty_grid_is_refused():
    rows = T.dynamic("rows")

    @T.prim_func
    def copy(X: T.Tensor((rows, 32), "float32"), Y: T.Tensor((rows, 32), "float32")):
        with T.Kernel(rows, threads=32) as b:
            Y[b, T.get_thread_binding()] = X[b, T.get_thread_binding()]

    with pytest.raises(SimulationError, match="copy_kernel: invalid grid 0x1x1"):
        Kernel("copy", copy)(torch.zeros(0, 32), torch.zeros(0, 32))


def test_code_that_does_not_compile():
    with pytest.raises(SimulationError, match=r"reverse: the compiler failed:\n.*nonsense"):
        launch(first("nonsense;"))
