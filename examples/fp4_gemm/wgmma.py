"""Writes wgmma.h: m64 nN k32 with e5m2 weights and e4m3 activations, for the widths that kernel.cu uses.

python examples/fp4_gemm/wgmma.py > wgmma.h
"""

WIDTHS = (8, 16, 32, 96, 112, 128, 192)
REGISTERS = "uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int add"
SHARED = "uint64_t a, uint64_t b, int add"


def function(name: str, n: int, arguments: str, a: list[str], given: str) -> str:
    """One overload; ``a``: where its first operand stands among the operands after the sums."""
    sums = n // 2
    sums_text = ", ".join(f"%{i}" for i in range(sums))
    first = "{" + ", ".join(f"%{sums + int(i)}" for i in a) + "}" if len(a) > 1 else f"%{sums}"
    b, add = sums + len(a), sums + len(a) + 1
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return (
        f"  static __device__ __forceinline__ void {name}(float (&d)[{sums}], {arguments}) {{\n"
        '    asm volatile("{\\n.reg .pred p;\\n'
        f"setp.ne.b32 p, %{add}, 0;\\n"
        f'wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e5m2.e4m3 {{{sums_text}}}, {first}, %{b}, p, 1, 1;\\n}}\\n"\n'
        f"                 : {outputs}\n"
        f"                 : {given});\n"
        "  }\n"
    )


def main() -> None:
    print("#pragma once\n#include <cstdint>\ntemplate <int N>\nstruct Wgmma;")
    for n in WIDTHS:
        print(f"template <>\nstruct Wgmma<{n}> {{")
        in_registers = '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add)'
        print(function("rs", n, REGISTERS, ["0", "1", "2", "3"], in_registers), end="")
        print(function("ss", n, SHARED, ["0"], '"l"(a), "l"(b), "r"(add)'), end="")
        print("};")


if __name__ == "__main__":
    main()
