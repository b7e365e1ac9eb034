"""The matrix instruction of Hopper that TileLang does not know: e5m2 in registers by e4m3 in shared memory."""


def in_registers(width: int) -> str:
    """CUDA of ``wgmma(d, a0, a1, a2, a3, b, add)``: d = a b, or d += a b; 64 rows, ``width`` columns, 32 of k."""
    sums = width // 2
    numbers = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{sums}], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,"
        f" uint64_t b, int add) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{sums + 5}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e5m2.e4m3 {{{numbers}}}, "\n'
        f'    "{{%{sums}, %{sums + 1}, %{sums + 2}, %{sums + 3}}}, %{sums + 4}, p, 1, 1;\\n}}\\n"\n'
        f'    : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));\n'
        "}\n"
    )
