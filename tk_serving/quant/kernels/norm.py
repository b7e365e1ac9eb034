"""RMSNorm of rows, with the addition of a residual before it and a cast behind it. A block takes one row.

A warp has the tile of ``tiles`` for one row, so that the scales of its groups need shuffles only.
"""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, bits_of, fmax, octet_writer, stored_as, strided_writer, view
from tk_serving.quant.kernels.scales import default_floor, mode_of
from tk_serving.quant.kernels.sources import source
from tk_serving.quant.kernels.sums import octet_sum, sum_of_row
from tk_serving.quant.kernels.tiles import HALVES, OCTETS, group_scales, inside, sf_tensor
from tk_serving.quant.scales import COLUMN, PACKED

RESIDENT = 48
"""Warps on an SM: a register more for each thread would make them a quarter fewer."""


def vector_reader(dtype, aligned):
    """Macro ``read(vector, octet, raw, at)``: eight elements of a vector into raw[8 at ...]."""
    piece = 4 if dtype == "float32" else OCTET

    @T.macro
    def read(vector, octet, raw, at):
        if aligned:
            pieces = view(vector, (vector.shape[0] // piece, piece), dtype)
            for j in T.unroll(OCTET // piece):
                for i in T.vectorized(piece):
                    raw[at * OCTET + j * piece + i] = pieces[0][octet * (OCTET // piece) + j, i]
        else:
            for i in T.unroll(OCTET):
                raw[at * OCTET + i] = vector[octet * OCTET + i]

    return read


def build(x, weight, residual, with_rstd, out, fmt, npc, layout, round_sf, mega, warps, whole, aligned):
    """out = x * rstd * (weight * factor), rounded to the dtype of x; and its cast with groups of ``npc`` columns.

    Args:
        weight, residual, with_rstd: whether there are weights, a residual to add and write back, rstd to store.
        out: dtype of the plain result, None for none.
        npc: 0 for no cast to ``fmt``; 32 or 128.
        mega: whether the exponents are stored once more, in the row order of scales in tensor memory.
        whole: the row fills the tiles of its warps. All loads can then come first, without branches between them.
    """
    read = source(x, aligned)
    read_vector = vector_reader(x, aligned)
    write_sum = strided_writer(x, aligned)
    write_out = octet_writer(out or x, aligned)
    write_data = octet_writer(fmt, aligned)
    scales = group_scales(fmt, npc, layout, round_sf, whole) if npc else None
    floor = default_floor(fmt, mode_of(layout, round_sf))
    column_major = npc and layout in (COLUMN, PACKED)
    data_dtype, data_bytes = stored_as(fmt)
    narrow = x == "bfloat16"  # float32 takes more registers than that
    early = whole and narrow

    tokens, width, blocks = T.dynamic("tokens"), T.dynamic("width"), T.dynamic("blocks")
    x_stride, r_stride, s_stride = (T.dynamic(name, "int64") for name in ("x_stride", "r_stride", "s_stride"))
    stride, m_stride = T.dynamic("stride", "int64"), T.dynamic("m_stride", "int64")
    m_rows, words = T.dynamic("m_rows"), T.dynamic("words")

    @T.macro
    def store_words(inverse, mega_sf, row, octet, octets, block_m, aligned_m):
        """Four exponents of a row in a word; a word is 16 lanes."""
        word = T.alloc_local((1,), "int32")
        place = T.alloc_local((1,), "int64")
        inner = T.alloc_local((1,), "int32")
        inner[0] = row % block_m
        place[0] = T.cast(row // block_m, "int64") * aligned_m + (
            inner[0] // 128 * 128 + inner[0] % 32 * 4 + inner[0] % 128 // 32
        )
        for h in T.unroll(HALVES):
            word[0] = (254 - (bits_of(inverse[h]) >> 23)) << (8 * (octet // 4 % 4))
            word[0] = word[0] | T.shfl_xor(word[0], 4)
            word[0] = word[0] | T.shfl_xor(word[0], 8)
            if octet % 16 == 0 and inside(octet, h, octets, whole) and row < tokens:
                mega_sf[place[0], (octet + h * 32) // 16] = word[0]

    @T.prim_func
    def norm(
        values: T.StridedTensor((tokens, width), (x_stride, 1), x),
        weights: T.Tensor((width,), x),
        added: T.StridedTensor((tokens, width), (r_stride, 1), x),
        summed: T.StridedTensor((tokens, width), (s_stride, 1), x),
        result: T.Tensor((tokens, width), out or x),
        rstds: T.Tensor((tokens,), "float32"),
        data: T.Tensor((tokens, width // OCTET * data_bytes), data_dtype),
        sf: sf_tensor(layout, tokens, blocks, stride),
        mega_sf: T.StridedTensor((m_rows, words), (1, m_stride), "int32"),
        eps: T.float32,
        out_scale: T.float32,
        block_m: T.int32,
        aligned_m: T.int32,
    ):
        with T.Kernel(stride if column_major else tokens, threads=32 * warps) as block:
            if narrow:
                T.annotate_min_blocks_per_sm(min(32, max(1, RESIDENT // warps)))
            T.assume(width % OCTET == 0)
            thread = T.get_thread_binding()
            octets = width // OCTET
            row = T.cast(block, "int32")
            octet = thread // 32 * OCTETS + thread % 32
            raw = T.alloc_local((HALVES * OCTET,), x)
            other = T.alloc_local((HALVES * OCTET,), x)
            eight = T.alloc_local((OCTET,), "float32")
            vector = T.alloc_local((HALVES * OCTET,), x)
            more = T.alloc_local((OCTET,), "float32")
            total = T.alloc_local((1,), "float32")
            rstd = T.alloc_local((1,), "float32")
            shared = T.alloc_shared((warps,), "float32")
            live = T.alloc_local((1,), "int32")
            amax = T.alloc_local((HALVES,), "float32")
            inverse = T.alloc_local((HALVES,), "float32")
            live[0] = T.cast(row < tokens, "int32")
            for h in T.unroll(HALVES):
                if (not column_major or row < tokens) and inside(octet, h, octets, whole):
                    read.load(values, row, octet + h * 32, raw, h)
                    if residual:
                        read.load(added, row, octet + h * 32, other, h)
            if weight and early:
                for h in T.unroll(HALVES):
                    if inside(octet, h, octets, whole):
                        read_vector(weights, octet + h * 32, vector, h)
            total[0] = T.float32(0.0)
            for h in T.unroll(HALVES):
                if (not column_major or row < tokens) and inside(octet, h, octets, whole):
                    read.decode(raw, h, eight)
                    if residual:
                        read.decode(other, h, more)
                        for i in T.unroll(OCTET):
                            raw[h * OCTET + i] = T.cast(eight[i] + more[i], x)
                        write_sum(summed, row, octet + h * 32, raw, h)
                        read.decode(raw, h, eight)
                    for i in T.unroll(OCTET):
                        eight[i] = eight[i] * eight[i]
                    total[0] = total[0] + octet_sum(eight, 0)
            if weight and not early:
                for h in T.unroll(HALVES):
                    if inside(octet, h, octets, whole):
                        read_vector(weights, octet + h * 32, vector, h)
            sum_of_row(total, shared, thread, warps)
            rstd[0] = T.float32(1.0) / T.sqrt(total[0] / T.cast(width, "float32") + eps)
            if with_rstd:
                if thread == 0 and row < tokens:
                    rstds[row] = rstd[0]
            for h in T.unroll(HALVES):
                amax[h] = T.float32(0.0)
                if (not column_major or row < tokens) and inside(octet, h, octets, whole):
                    read.decode(raw, h, eight)
                    if weight:
                        read.decode(vector, h, more)
                    for i in T.unroll(OCTET):
                        if weight:
                            eight[i] = eight[i] * rstd[0] * (more[i] * out_scale)
                        else:
                            eight[i] = eight[i] * rstd[0] * out_scale
                        raw[h * OCTET + i] = T.cast(eight[i], x)
                    read.decode(raw, h, eight)
                    for i in T.unroll(OCTET):
                        amax[h] = fmax(amax[h], T.abs(eight[i]))
                    if out is not None:
                        write_out(result, row, octet + h * 32, eight, T.float32(1.0))
            if npc:
                scales(amax, inverse, sf, stride, row, octet, octets, tokens, live, T.float32(floor))
                for h in T.unroll(HALVES):
                    if (not column_major or row < tokens) and inside(octet, h, octets, whole):
                        read.decode(raw, h, eight)
                        write_data(data, row, octet + h * 32, eight, inverse[h])
                if mega:
                    store_words(inverse, mega_sf, row, octet, octets, block_m, aligned_m)

    return norm
