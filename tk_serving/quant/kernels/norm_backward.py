"""Gradients of RMSNorm: a block takes every n-th row and keeps its share of the weight gradient in registers.

Its next row travels to shared memory while it works on this one; a thread copies what it alone will read.
"""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, octet_writer
from tk_serving.quant.kernels.norm import vector_reader
from tk_serving.quant.kernels.sources import SIZES, source, words_of
from tk_serving.quant.kernels.sums import octet_sum, sum_of_row
from tk_serving.quant.kernels.tiles import HALVES, OCTETS

GROUPS = 16
"""Groups of partial sums, each added up by a warp."""


def build(x, weight, residual, warps, aligned):
    """Gradient of the input and, with ``weight``, the sums of grad * x * rstd over the rows of each block."""
    read, read_vector, write = source(x, aligned), vector_reader(x, aligned), octet_writer(x, aligned)
    write_partial = octet_writer("float32", True)
    values_of = source("float32", True).decode
    threads = 32 * warps
    inputs = 2 + residual
    per_piece = 16 // SIZES[x]  # values of one copy
    pieces = OCTET // per_piece
    # Two blocks on a multiprocessor, where their threads have registers enough: 72 each with 14 warps.
    resident = 2 if x == "bfloat16" and warps <= 14 else 1
    tokens, width, partials = T.dynamic("tokens"), T.dynamic("width"), T.dynamic("partials")
    g_stride, x_stride, r_stride = (T.dynamic(name, "int64") for name in ("g_stride", "x_stride", "r_stride"))

    @T.macro
    def copy_octet(ring, which, h, tensor, row, octet, thread):
        for j in T.unroll(pieces):
            column = octet * OCTET + j * per_piece
            if aligned:
                T.evaluate(
                    T.call_extern(
                        "handle",
                        "tl::cp_async_gs<16>",
                        T.address_of(ring[which, h, j, thread, 0]),
                        T.address_of(tensor[row, column]),
                    )
                )
            else:
                for i in T.unroll(per_piece):
                    ring[which, h, j, thread, i] = tensor[row, column + i]

    @T.macro
    def fetch(ring, out_grad, values, residual_grad, row, octet, octets, thread):
        for h in T.unroll(HALVES):
            if octet + h * 32 < octets:
                copy_octet(ring, 0, h, out_grad, row, octet + h * 32, thread)
                copy_octet(ring, 1, h, values, row, octet + h * 32, thread)
                if residual:
                    copy_octet(ring, 2, h, residual_grad, row, octet + h * 32, thread)
        T.ptx_commit_group()

    @T.macro
    def take(ring_words, which, raw, thread):
        words = words_of(raw, x)
        for h in T.unroll(HALVES):
            for j in T.unroll(pieces):
                for i in T.vectorized(4):
                    words[0][(h * pieces + j) * 4 + i] = ring_words[which, h, j, thread, i]

    @T.macro
    def scale_of(raw_weight, h, out_scale, scale):
        """The weight times the scale; made again where needed, as registers are scarce."""
        if weight:
            read.decode(raw_weight, h, scale)
        for i in T.unroll(OCTET):
            if weight:
                scale[i] = scale[i] * out_scale
            else:
                scale[i] = out_scale

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
        with T.Kernel(blocks, threads=threads) as block:
            T.annotate_min_blocks_per_sm(resident)
            T.assume(width % OCTET == 0)
            thread = T.get_thread_binding()
            octets = width // OCTET
            octet = thread // 32 * OCTETS + thread % 32
            ring = T.alloc_shared((inputs, HALVES, pieces, threads, per_piece), x)
            ring_words = T.Tensor((inputs, HALVES, pieces, threads, 4), "int32", data=ring.data, scope="shared.dyn")
            shared = T.alloc_shared((2 * warps,), "float32")
            raw_grad = T.alloc_local((HALVES * OCTET,), x)
            raw = T.alloc_local((HALVES * OCTET,), x)
            raw_weight = T.alloc_local((HALVES * OCTET,), x)
            raw_residual = T.alloc_local((HALVES * OCTET,), x)
            sums = T.alloc_local((HALVES * OCTET,), "float32")
            g = T.alloc_local((OCTET,), "float32")
            v = T.alloc_local((OCTET,), "float32")
            more = T.alloc_local((OCTET,), "float32")
            scale = T.alloc_local((OCTET,), "float32")
            total = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((2,), "float32")  # of this row, of the next
            steps = T.ceildiv(tokens - block, blocks)
            if steps > 0:
                fetch(ring, out_grad, values, residual_grad, block, octet, octets, thread)
                inverse[1] = rstd[block]
            for h in T.unroll(HALVES):
                for i in T.unroll(OCTET):
                    sums[h * OCTET + i] = T.float32(0.0)
                if weight:
                    if octet + h * 32 < octets:
                        read_vector(weights, octet + h * 32, raw_weight, h)
            for step in T.serial(steps):
                row = step * blocks + block
                inverse[0] = inverse[1]
                T.ptx_wait_group(0)
                take(ring_words, 0, raw_grad, thread)
                take(ring_words, 1, raw, thread)
                if residual:
                    take(ring_words, 2, raw_residual, thread)
                if step + 1 < steps:
                    inverse[1] = rstd[row + blocks]
                    fetch(ring, out_grad, values, residual_grad, row + blocks, octet, octets, thread)
                total[0] = T.float32(0.0)
                for h in T.unroll(HALVES):
                    if octet + h * 32 < octets:
                        read.decode(raw_grad, h, g)
                        read.decode(raw, h, v)
                        scale_of(raw_weight, h, out_scale, scale)
                        for i in T.unroll(OCTET):
                            if weight:
                                sums[h * OCTET + i] = sums[h * OCTET + i] + g[i] * v[i] * inverse[0]
                            g[i] = scale[i] * g[i] * v[i]
                        total[0] = total[0] + octet_sum(g, 0)
                sum_of_row(total, shared, thread, warps, step % 2)
                total[0] = inverse[0] * inverse[0] * (total[0] / T.cast(width, "float32"))
                for h in T.unroll(HALVES):
                    if octet + h * 32 < octets:
                        read.decode(raw_grad, h, g)
                        read.decode(raw, h, v)
                        scale_of(raw_weight, h, out_scale, scale)
                        if residual:
                            read.decode(raw_residual, h, more)
                        for i in T.unroll(OCTET):
                            g[i] = inverse[0] * (scale[i] * g[i] - v[i] * total[0])
                            if residual:
                                g[i] = g[i] + more[i]
                        write(x_grad, row, octet + h * 32, g, T.float32(1.0))
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
