"""CUDA's built-in functions give what the CUDA manuals say: each expression runs on the lanes of one warp."""

import math
import re

import pytest
import tilelang.language as T  # noqa: N812  the custom of TileLang
import torch

from tk_serving.simulator import Kernel

LANES = 32
NAN, INF = math.nan, math.inf
ORDER = list(range(LANES))


def evaluate(expression: str, a: torch.Tensor, b: torch.Tensor, out: torch.dtype, setup: str = "") -> torch.Tensor:
    """The expression in ``a``, ``b`` (values of the lane) and ``lane``, on each of the 32 lanes."""
    ta, tb, to = (str(t).removeprefix("torch.") for t in (a.dtype, b.dtype, out))

    @T.prim_func
    def lanes(A: T.Tensor((LANES,), ta), B: T.Tensor((LANES,), tb), Y: T.Tensor((LANES,), to)):
        with T.Kernel(1, threads=LANES):
            t = T.get_thread_binding()
            Y[t] = T.cast(A[t], to) + T.cast(B[t], to)

    def edit(cuda: str) -> str:
        body = f"int lane = threadIdx.x; auto a = A[lane]; auto b = B[lane]; {setup} Y[lane] = {expression};"
        return re.sub(r"(?m)^  [^\n]*Y\[[^\n]*\n|^  \w[^\n]*= [^\n]*;\n", "", cuda).replace(
            ") {\n", ") {\n  " + body + "\n", 1
        )

    result = torch.zeros(LANES, dtype=out)
    Kernel("lanes", lanes, edit)(a, b, result)
    return result


def fill(values, dtype: torch.dtype) -> torch.Tensor:
    values = list(values)
    return torch.tensor((values * LANES)[:LANES], dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(
        dtype
    )


def check(expression, a, b, expected, dtypes=(torch.int32, torch.int32, torch.int32), setup=""):
    first, second, out = dtypes
    got = evaluate(expression, fill(a, first), fill(b, second), out, setup)
    want = fill(expected, out)
    same = (got == want) | ((got != got) & (want != want))
    assert same.all(), f"{expression}: {got.tolist()} instead of {want.tolist()}"


I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64
INTS = (I32, I32, I32)
LONGS = (I64, I64, I64)
FLOATS = (F32, F32, F32)

INTEGERS = [
    ("__popc(a)", [0, 1, 255, -1], [0], [0, 1, 8, 32], INTS),
    ("__popcll(a)", [0, -1, 2**40 + 1], [0], [0, 64, 2], LONGS),
    ("__clz(a)", [0, 1, -1, 256], [0], [32, 31, 0, 23], INTS),
    ("__clzll(a)", [0, 1, -1], [0], [64, 63, 0], LONGS),
    ("__ffs(a)", [0, 1, 12, -(2**31)], [0], [0, 1, 3, 32], INTS),
    ("__ffsll(a)", [0, 2**40], [0], [0, 41], LONGS),
    ("__brev(a)", [1, 2], [0], [-(2**31), 2**30], INTS),
    ("__brevll(a)", [1, 2], [0], [-(2**63), 2**62], LONGS),
    ("__byte_perm(a, b, 0x5140)", [0x33221100], [0x77665544], [0x55114400], INTS),
    ("__byte_perm(a, b, 0x8888)", [0x80], [0], [-1], INTS),
    ("__funnelshift_l(a, b, 8)", [0x12345678], [-1], [0xFFFFFF12 - 2**32], INTS),
    ("__funnelshift_r(a, b, 40)", [0x12345678], [0xAB], [0xAB123456 - 2**32], INTS),
    ("__funnelshift_lc(a, b, 40)", [0x12345678], [0xAB], [0x12345678], INTS),
    ("__funnelshift_rc(a, b, 40)", [0x12345678], [0xAB], [0xAB], INTS),
    ("__mulhi(a, b)", [2**30, -(2**31)], [8, 2], [2, -1], INTS),
    ("__umulhi(a, b)", [-1], [16], [15], INTS),
    ("__mul64hi(a, b)", [-1, 2**62], [5, 8], [-1, 2], LONGS),
    ("__umul64hi(a, b)", [-1], [16], [15], LONGS),
    ("__dp4a(a, b, 7)", [0x01020304], [0x01FF01FF - 2**32 * 0], [7 + 1 - 2 + 3 - 4], INTS),
    ("min(a, b)", [-1, 3], [2, 2], [-1, 2], INTS),
    ("max(a, 2ll)", [-1, 3], [0], [2, 3], INTS),
    # Signed overflow wraps, as on the device.
    ("a + b", [2**31 - 1], [1], [-(2**31)], INTS),
    ("a * b", [2**62], [4], [0], LONGS),
]

WARP = [
    ("__shfl_sync(0xffffffff, a, 5)", ORDER, [0], [5], INTS),
    ("__shfl_sync(0xffffffff, a, 3, 8)", ORDER, [0], [3] * 8 + [11] * 8 + [19] * 8 + [27] * 8, INTS),
    ("__shfl_xor_sync(0xffffffff, a, 1)", ORDER, [0], [i ^ 1 for i in ORDER], INTS),
    ("__shfl_xor_sync(0xffffffff, a, 16)", ORDER, [0], [i ^ 16 for i in ORDER], LONGS),
    ("__shfl_xor_sync(0xffffffff, a, 3)", ORDER, [0], [i ^ 3 for i in ORDER], FLOATS),
    ("__shfl_xor_sync(0xffffffff, (double)a, 3)", ORDER, [0], [i ^ 3 for i in ORDER], FLOATS),
    ("__shfl_up_sync(0xffffffff, a, 2)", ORDER, [0], [max(i - 2, i if i < 2 else 0) for i in ORDER], INTS),
    ("__shfl_down_sync(0xffffffff, a, 2, 16)", ORDER, [0], [i + 2 if i % 16 < 14 else i for i in ORDER], INTS),
    ("__ballot_sync(0xffffffff, a & 1)", ORDER, [0], [0xAAAAAAAA - 2**32], INTS),
    ("lane < 8 ? __ballot_sync(0xff, a == 3) : 9", ORDER, [0], [8] * 8 + [9] * 24, INTS),
    ("__any_sync(0xffffffff, a == 31)", ORDER, [0], [1], INTS),
    ("__all_sync(0xffffffff, a >= 0)", ORDER, [0], [1], INTS),
    ("__all_sync(0xffffffff, a > 0)", ORDER, [0], [0], INTS),
    ("__match_any_sync(0xffffffff, a)", [0, 1], [0], [0x55555555, 0xAAAAAAAA - 2**32], INTS),
    ("__reduce_add_sync(0xffffffff, a)", ORDER, [0], [496], INTS),
    ("__reduce_max_sync(0xffffffff, a)", [-5, -3, -9], [0], [-3], INTS),
    ("__reduce_max_sync(0xffffffff, (unsigned)a)", [-5, 3], [0], [-5], INTS),
    ("__reduce_min_sync(0xffffffff, a)", [-5, 3], [0], [-5], INTS),
    ("__reduce_min_sync(0xffffffff, (unsigned)a)", [-5, 3], [0], [3], INTS),
    ("__reduce_and_sync(0xffffffff, (unsigned)a)", [7, 13], [0], [5], INTS),
    ("__reduce_or_sync(0xffffffff, (unsigned)a)", [1, 4], [0], [5], INTS),
    ("__reduce_xor_sync(0xffffffff, (unsigned)a)", [1] * 31 + [2], [0], [3], INTS),
    ("tl::warp_reduce_sum(a)", ORDER, [0], [496], FLOATS),
    ("tl::warp_reduce_max(a)", ORDER, [0], [31], INTS),
]

EPS = 2.0**-23
NUMBERS = [
    ("__fmaf_rn(a, b, -1.0f)", [1 + EPS], [1 - EPS], [-(EPS**2)], FLOATS),
    ("a * b - 1.0f", [1 + EPS], [1 - EPS], [0.0], FLOATS),  # never contracted
    ("__fadd_rn(a, b)", [1.0], [EPS / 2], [1.0], FLOATS),
    ("__fadd_ru(a, b)", [1.0, 1.0], [EPS / 4, -EPS], [1 + EPS, 1 - EPS], FLOATS),
    ("__fadd_rd(a, b)", [1.0], [-EPS / 8], [1 - EPS / 2], FLOATS),
    ("__fadd_rz(a, b)", [-1.0], [-EPS / 2], [-1.0], FLOATS),
    ("__fmul_ru(a, b)", [1 + EPS], [1 + EPS], [1 + 3 * EPS], FLOATS),
    ("__fdiv_rd(a, b)", [1.0], [3.0], [float(torch.tensor(1 / 3).nextafter(torch.tensor(0.0)))], FLOATS),
    ("__fdiv_rn(a, b)", [1.0], [3.0], [float(torch.tensor(1.0) / 3)], FLOATS),
    ("__frcp_rn(a)", [3.0, 0.0], [0], [float(torch.tensor(1.0) / 3), INF], FLOATS),
    ("__fsqrt_rn(a)", [2.0], [0], [float(torch.tensor(2.0).sqrt())], FLOATS),
    ("__fmaf_rd(a, a, b)", [1 + EPS], [0.0], [1 + 2 * EPS], FLOATS),
    ("__dadd_rn(a, b)", [1.0], [2.0**-60], [1.0], (F64, F64, F64)),
    ("rsqrtf(a)", [4.0, 0.0], [0], [0.5, INF], FLOATS),
    ("sqrtf(a) + expf(0.0f) + log1pf(0.0f)", [9.0], [0], [4.0], FLOATS),
    ("__saturatef(a)", [-1.0, 0.25, 2.0, NAN], [0], [0.0, 0.25, 1.0, 0.0], FLOATS),
    ("max(a, b)", [NAN, 1.0], [2.0, NAN], [2.0, 1.0], FLOATS),
    ("min(a, b)", [NAN, 1.0], [2.0, -3.0], [2.0, -3.0], FLOATS),
    ("fmaxf(a, b)", [NAN, NAN], [2.0, NAN], [2.0, NAN], FLOATS),
    ("__ldg(&A[lane]) + __ldg(&B[0])", [1.0], [2.0], [3.0], FLOATS),
    ("isnan(a) + 2 * isinf(a)", [NAN, INF, 1.0], [0], [1, 2, 0], (F32, F32, I32)),
    ("__float_as_int(a)", [1.0, -0.0], [0], [0x3F800000, -(2**31)], (F32, F32, I32)),
    ("__float_as_uint(a) >> 23", [1.0], [0], [127], (F32, F32, I32)),
    ("__int_as_float(a)", [0x40000000], [0], [2.0], (I32, I32, F32)),
    ("__double_as_longlong(a)", [1.0], [0], [0x3FF << 52], (F64, F64, I64)),
    ("__float2int_rn(a)", [2.5, 3.5, 1e20, NAN], [0], [2, 4, 2**31 - 1, 0], (F32, F32, I32)),
    ("__float2int_rz(a)", [2.9, -2.9], [0], [2, -2], (F32, F32, I32)),
    ("__float2int_rd(a)", [-2.1], [0], [-3], (F32, F32, I32)),
    ("__float2uint_ru(a)", [2.1, -3.0], [0], [3, 0], (F32, F32, I32)),
]

CONVERSIONS = [
    # Ties to even, saturation, signed zero and NaN of the 8-bit formats, by NVIDIA's host conversions.
    (
        "float(fp8_e4_t(a))",
        [17.0, 19.0, 500.0, -1e9, NAN, 0.001],
        [0],
        [16.0, 20.0, 448.0, -448.0, NAN, 2.0**-9 * 1],
        FLOATS,
    ),
    ("float(fp8_e5_t(a))", [1.125, 1e9, NAN], [0], [1.0, 57344.0, NAN], FLOATS),
    ("(float)(half_t)a", [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1e9], [0], [1.0, 1 + 2.0**-9, INF], FLOATS),
    ("(float)(bfloat16_t)a", [1 + 2.0**-8, 1 + 3 * 2.0**-8], [0], [1.0, 1 + 2.0**-6], FLOATS),
    ("__bfloat162float(__float2bfloat16_rz(a))", [1 + 2.0**-7 - EPS], [0], [1.0], FLOATS),
    (
        "__low2float(__hadd2(__floats2bfloat162_rn(a, b), __floats2bfloat162_rn(1.0f, 2.0f)))",
        [1.5],
        [3.0],
        [2.5],
        FLOATS,
    ),
    ("__high2float(__hmul2(__floats2half2_rn(a, b), __floats2half2_rn(1.0f, 2.0f)))", [1.5], [3.0], [6.0], FLOATS),
    # A bfloat16 fma rounds once: just below the middle between two values, which float32 would round to the middle.
    (
        "__bfloat162float(__hfma((__nv_bfloat16)a, (__nv_bfloat16)b, (__nv_bfloat16)-0x1p-40f))",
        [1 + 2.0**-7],
        [1.5],
        [1.5 + 2.0**-7],
        FLOATS,
    ),
    (
        "__bfloat162float(__hfma((__nv_bfloat16)a, (__nv_bfloat16)b, (__nv_bfloat16)-0x1p-90f))",
        [1 + 2.0**-7],
        [1.5],
        [1.5 + 2.0**-7],
        FLOATS,
    ),
    ("(float)__nv_fp8_e8m0(a)", [1.0, 4.0], [0], [1.0, 4.0], FLOATS),
    (
        "__nv_cvt_float_to_fp4(a, __NV_E2M1, cudaRoundNearest)",
        [0.25, 0.75, 5.0, -9.0, 2.5],
        [0],
        [0, 2, 6, 15, 4],
        (F32, F32, I32),
    ),
]

ATOMICS = [
    (
        "(__syncthreads(), __ldcg(&Y[0]))",
        [0],
        [0],
        [496],
        (I32, I32, I32),
        "Y[lane] = 0; __syncthreads(); atomicAdd(&Y[0], lane);",
    ),
    ("atomicMax(&Y[lane], a)", [5], [0], [0], (I32, I32, I32), ""),
    ("(AtomicAdd(&Y[lane], a), Y[lane])", [1.5], [0], [1.5], FLOATS, ""),
    ("(AtomicMax(&Y[lane], a), Y[lane])", [7], [0], [7], INTS, ""),
    ("(AtomicOr(&Y[lane], a), Y[lane])", [6], [0], [6], INTS, ""),
    ("atomicCAS(&Y[lane], 0, a) + Y[lane]", [9], [0], [9], INTS, ""),
    ("atomicExch(&Y[lane], a) + Y[lane]", [9], [0], [9], LONGS, ""),
]


@pytest.mark.parametrize(("expression", "a", "b", "expected", "dtypes"), INTEGERS + WARP + NUMBERS + CONVERSIONS)
def test_expression(expression, a, b, expected, dtypes):
    check(expression, a, b, expected, dtypes)


@pytest.mark.parametrize(("expression", "a", "b", "expected", "dtypes", "setup"), ATOMICS)
def test_atomic(expression, a, b, expected, dtypes, setup):
    check(expression, a, b, expected, dtypes, setup)


def test_tensor_core_product():
    """mma.m16n8k8 on TF32, with the fragment layout of the PTX manual."""
    a, b = torch.randn(16, 8), torch.randn(8, 8)

    @T.prim_func
    def lanes(A: T.Tensor((16, 8), "float32"), B: T.Tensor((8, 8), "float32"), Y: T.Tensor((16, 8), "float32")):
        with T.Kernel(1, threads=LANES):
            t = T.get_thread_binding()
            Y[t // 2, t % 8] = A[t // 2, t % 8] + B[t // 4, t % 8]

    body = """
      int g = threadIdx.x / 4, t = threadIdx.x % 4;
      unsigned a[4], b[2]; float c[4] = {1, 1, 1, 1};
      for (int r = 0; r < 4; r++) a[r] = __float_as_uint(A[(g + 8 * (r & 1)) * 8 + t + 4 * (r >> 1)]);
      for (int r = 0; r < 2; r++) b[r] = __float_as_uint(B[(t + 4 * r) * 8 + g]);
      sim::mma_tf32_16x8x8(c, a, b);
      for (int r = 0; r < 4; r++) Y[(g + 8 * (r >> 1)) * 8 + 2 * t + (r & 1)] = c[r];
      return;"""
    result = torch.zeros(16, 8)
    Kernel("lanes", lanes, lambda cuda: cuda.replace(") {\n", ") {\n" + body, 1))(a, b, result)
    tf32 = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for x in (a, b)]
    assert torch.allclose(result.double(), tf32[0] @ tf32[1] + 1, rtol=1e-6, atol=1e-6)


def test_warp_group_product():
    """wgmma m64n16k32 of e5m2 in registers by swizzled e4m3 in shared memory, as the PTX manual lays them out."""
    a = torch.randn(64, 32).to(torch.float8_e5m2)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn)

    @T.prim_func
    def group(A: T.Tensor((64, 32), "uint8"), B: T.Tensor((16, 32), "uint8"), Y: T.Tensor((64, 16), "float32")):
        with T.Kernel(1, threads=128):
            t = T.get_thread_binding()
            room = T.alloc_shared((2048,), "uint8")
            room[t] = A[t // 2, 0] + B[t // 8, 0]
            Y[t // 2, t % 16] = T.cast(room[127 - t], "float32")

    sums = ", ".join(f'"+f"(d[{i}])' for i in range(8))
    body = (
        """
      extern __shared__ __align__(1024) unsigned char tile[];
      int t = threadIdx.x, g = t % 32 / 4, q = t % 4, w = t / 32;
      for (int i = t; i < 512; i += 128) tile[i / 32 * 128 + (i % 32 ^ (i / 32 % 8) * 16)] = B[i];
      unsigned a[4]; float d[8] = {1, 1, 1, 1, 1, 1, 1, 1};
      for (int r = 0; r < 4; r++) a[r] = *(unsigned*)(A + (16 * w + g + 8 * (r & 1)) * 32 + 16 * (r >> 1) + 4 * q);
      __syncthreads();
      unsigned long long at = (1ull << 62) | (64ull << 32) | (1ull << 16) | __cvta_generic_to_shared(tile) >> 4;
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k32.f32.e5m2.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1; }" : """
        + sums
        + """ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(at), "r"(1));
      for (int i = 0; i < 8; i++) Y[(16 * w + g + i / 2 % 2 * 8) * 16 + i / 4 * 8 + 2 * q + i % 2] = d[i];
      return;"""
    )
    result = torch.zeros(64, 16)
    kernel = Kernel("group", group, lambda cuda: cuda.replace(") {\n", ") {\n" + body, 1))
    kernel(a.view(torch.uint8), b.view(torch.uint8), result)
    assert torch.allclose(result.double(), a.double() @ b.double().T + 1, rtol=1e-6)


def test_transposed_matrix_store():
    """stmatrix .x2.trans: each lane brings two elements of a row of the transposed matrices."""

    @T.prim_func
    def matrices(A: T.Tensor((64,), "int32"), Y: T.Tensor((128,), "int16")):
        with T.Kernel(1, threads=LANES):
            t = T.get_thread_binding()
            room = T.alloc_shared((128,), "int16")
            room[t] = T.cast(A[t], "int16")
            Y[t] = room[31 - t]

    body = """
      extern __shared__ __align__(1024) short tile[];
      int t = threadIdx.x;
      unsigned row = (unsigned)__cvta_generic_to_shared(tile + (t % 16) * 8);
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
        :: "r"(row), "r"(A[t]), "r"(A[32 + t]));
      __syncthreads();
      for (int i = t; i < 128; i += 32) Y[i] = tile[i];
      return;"""
    given = torch.arange(128, dtype=torch.int16).view(2, 8, 4, 2)  # matrix, column, rows of a lane
    result = torch.zeros(128, dtype=torch.int16)
    kernel = Kernel("matrices", matrices, lambda cuda: cuda.replace(") {\n", ") {\n" + body, 1))
    kernel(given.reshape(-1).view(torch.int32), result)
    assert torch.equal(result.view(2, 8, 8), given.reshape(2, 8, 8).transpose(1, 2))
