"""Elementwise product; a thread makes eight elements."""

import tilelang.language as T

THREADS = 128


def build(wide: bool):
    elements = T.dynamic("elements", "int64")
    unit, count = ("int32x4", 1) if wide else ("bfloat16", 8)
    out_unit, out_count = ("float32x4", 2) if wide else ("float32", 8)

    @T.prim_func
    def fused_weight(
        hidden: T.Tensor((elements,), "bfloat16"),
        embed: T.Tensor((elements,), "bfloat16"),
        out: T.Tensor((elements,), "float32"),
    ):
        with T.Kernel(T.ceildiv(elements, THREADS * 8), threads=THREADS) as block:
            at = T.cast(block, "int64") * THREADS + T.get_thread_binding()
            hidden_units = T.Tensor((elements // 8 * count,), unit, data=hidden.data)
            embed_units = T.Tensor((elements // 8 * count,), unit, data=embed.data)
            out_units = T.Tensor((elements // 8 * out_count,), out_unit, data=out.data)
            a = T.alloc_local((8,), "bfloat16")
            b = T.alloc_local((8,), "bfloat16")
            product = T.alloc_local((8,), "float32")
            a_units = T.Tensor((count,), unit, data=a.data, scope="local")
            b_units = T.Tensor((count,), unit, data=b.data, scope="local")
            product_units = T.Tensor((out_count,), out_unit, data=product.data, scope="local")
            if at < elements // 8:
                for i in T.unroll(count):
                    a_units[i] = hidden_units[at * count + i]
                    b_units[i] = embed_units[at * count + i]
                for j in T.unroll(8):
                    product[j] = T.cast(a[j], "float32") * T.cast(b[j], "float32")
                for i in T.unroll(out_count):
                    out_units[at * out_count + i] = product_units[i]

    return fused_weight
