"""Gradients of RMSNorm: a block takes every n-th row and keeps its share of the weight gradient in registers."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, octet_writer
from tk_serving.quant.kernels.norm import vector_reader
from tk_serving.quant.kernels.sources import source
from tk_serving.quant.kernels.sums import octet_sum, sum_of_row
from tk_serving.quant.kernels.tiles import HALVES, OCTETS

GROUPS = 16
"""Groups of partial sums, each added up by a warp."""


def build(x, weight, residual, warps, aligned):
    """Gradient of the input and, with ``weight``, the sums of grad * x * rstd over the rows of each block."""
    read, read_vector, write = source(x, aligned), vector_reader(x, aligned), octet_writer(x, aligned)
    write_partial = octet_writer("float32", True)
    values_of = source("float32", True).decode
    tokens, width, partials = T.dynamic("tokens"), T.dynamic("width"), T.dynamic("partials")
    g_stride, x_stride, r_stride = (T.dynamic(name, "int64") for name in ("g_stride", "x_stride", "r_stride"))

    @T.prim_func
    def norm_backward(
        out_grad: T.StridedTensor((tokens, width), (g_stride, 1), x),
        values: T.StridedTensor((tokens, width), (x_stride, 1), x),
        weights: T.Tensor((width,), x),
        rstd: T.Tensor((tokens,), "float32"),
        residual_grad: T.StridedTensor((tokens, width), (r_stride, 1), x),
        x_grad: T.Tensor((tokens, width), x),
        partial: T.Tensor((partials, width), "float32"),
        out_scale: T.float32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=32 * warps) as block:
            T.assume(width % OCTET == 0)
            thread = T.get_thread_binding()
            octets = width // OCTET
            octet = thread // 32 * OCTETS + thread % 32
            shared = T.alloc_shared((warps,), "float32")
            raw_grad = T.alloc_local((HALVES * OCTET,), x)
            raw = T.alloc_local((HALVES * OCTET,), x)
            raw_weight = T.alloc_local((HALVES * OCTET,), x)
            raw_residual = T.alloc_local((HALVES * OCTET,), x)
            scaled = T.alloc_local((HALVES * OCTET,), "float32")
            sums = T.alloc_local((HALVES * OCTET,), "float32")
            g = T.alloc_local((OCTET,), "float32")
            v = T.alloc_local((OCTET,), "float32")
            more = T.alloc_local((OCTET,), "float32")
            total = T.alloc_local((1,), "float32")
            for h in T.unroll(HALVES):
                for i in T.unroll(OCTET):
                    sums[h * OCTET + i] = T.float32(0.0)
                    scaled[h * OCTET + i] = out_scale
                if weight:
                    if octet + h * 32 < octets:
                        read_vector(weights, octet + h * 32, raw_weight, h)
                        read.decode(raw_weight, h, more)
                        for i in T.unroll(OCTET):
                            scaled[h * OCTET + i] = more[i] * out_scale
            for step in T.serial(T.ceildiv(tokens - block, blocks)):
                row = step * blocks + block
                for h in T.unroll(HALVES):
                    if octet + h * 32 < octets:
                        read.load(out_grad, row, octet + h * 32, raw_grad, h)
                        read.load(values, row, octet + h * 32, raw, h)
                        if residual:
                            read.load(residual_grad, row, octet + h * 32, raw_residual, h)
                inverse = rstd[row]
                total[0] = T.float32(0.0)
                for h in T.unroll(HALVES):
                    if octet + h * 32 < octets:
                        read.decode(raw_grad, h, g)
                        read.decode(raw, h, v)
                        for i in T.unroll(OCTET):
                            if weight:
                                sums[h * OCTET + i] = sums[h * OCTET + i] + g[i] * v[i] * inverse
                            g[i] = scaled[h * OCTET + i] * g[i] * v[i]
                        total[0] = total[0] + octet_sum(g, 0)
                sum_of_row(total, shared, thread, warps)
                total[0] = inverse * inverse * (total[0] / T.cast(width, "float32"))
                for h in T.unroll(HALVES):
                    if octet + h * 32 < octets:
                        read.decode(raw_grad, h, g)
                        read.decode(raw, h, v)
                        if residual:
                            read.decode(raw_residual, h, more)
                        for i in T.unroll(OCTET):
                            g[i] = inverse * (scaled[h * OCTET + i] * g[i] - v[i] * total[0])
                            if residual:
                                g[i] = g[i] + more[i]
                        write(x_grad, row, octet + h * 32, g, T.float32(1.0))
                if warps > 1:
                    T.sync_threads()
            if weight:
                for h in T.unroll(HALVES):
                    if octet + h * 32 < octets:
                        values_of(sums, h, g)
                        write_partial(partial, block, octet + h * 32, g, T.float32(1.0))

    return norm_backward


def weights(dtype, add):
    """weight_grad = out_scale * the sum over the partial sums, added to what is there with ``add``."""
    partials, width = T.dynamic("partials"), T.dynamic("width")

    @T.prim_func
    def norm_weight_grad(
        partial: T.Tensor((partials, width), "float32"),
        weight_grad: T.Tensor((width,), dtype),
        out_scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(width, 32), threads=32 * GROUPS) as block:
            thread = T.get_thread_binding()
            shared = T.alloc_shared((GROUPS, 32), "float32")
            total = T.alloc_local((1,), "float32")
            column = block * 32 + thread % 32
            total[0] = T.float32(0.0)
            if column < width:
                for step in T.serial(T.ceildiv(partials - thread // 32, GROUPS)):
                    total[0] = total[0] + partial[step * GROUPS + thread // 32, column]
            shared[thread // 32, thread % 32] = total[0]
            T.sync_threads()
            if thread < 32 and column < width:
                for group in T.unroll(GROUPS - 1):
                    total[0] = total[0] + shared[group + 1, thread % 32]
                total[0] = total[0] * out_scale
                if add:
                    total[0] = T.cast(weight_grad[column], "float32") + total[0]
                weight_grad[column] = T.cast(total[0], dtype)

    return norm_weight_grad
