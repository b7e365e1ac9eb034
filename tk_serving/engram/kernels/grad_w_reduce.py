"""A thread for each weight: partial sums are added in ascending order, several loads under way at a time."""

import tilelang.language as T

THREADS = 128
AHEAD = 16


def build():
    partials, elements = T.dynamic("partials", "int64"), T.dynamic("elements", "int64")
    bf16, f32 = "bfloat16", "float32"

    @T.prim_func
    def grad_w_reduce(
        partial: T.Tensor((partials, elements), f32),
        weight_hidden: T.Tensor((elements,), bf16),
        weight_embed: T.Tensor((elements,), bf16),
        grad_hidden: T.Tensor((elements,), f32),
        grad_embed: T.Tensor((elements,), f32),
    ):
        with T.Kernel(T.ceildiv(elements, THREADS), threads=THREADS) as block:
            at = T.cast(block, "int64") * THREADS + T.get_thread_binding()
            loaded = T.alloc_local((AHEAD,), f32)
            total = T.alloc_local((1,), f32)
            total[0] = 0.0
            if at < elements:
                for step in T.serial(T.ceildiv(partials, AHEAD)):
                    for i in T.unroll(AHEAD):
                        if step * AHEAD + i < partials:
                            loaded[i] = partial[step * AHEAD + i, at]
                    for i in T.unroll(AHEAD):
                        if step * AHEAD + i < partials:
                            total[0] = total[0] + loaded[i]
                grad_hidden[at] = grad_hidden[at] + total[0] * T.cast(weight_embed[at], f32)
                grad_embed[at] = grad_embed[at] + total[0] * T.cast(weight_hidden[at], f32)

    return grad_w_reduce
