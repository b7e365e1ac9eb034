"""Element-wise change of format with known scales: cast-back, and casts whose scales are given."""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, stored_as
from tk_serving.quant.kernels.rounding import rounding_writer
from tk_serving.quant.kernels.sources import block_factor, source
from tk_serving.quant.kernels.tiles import HALVES, WARPS, first_octet, grid, row_of


def build(x, x_sf, x_block, sf, sf_block, fmt, stochastic, aligned):
    """out = x * (x_sf * (1 / sf)), rounded to ``fmt``.

    Args:
        x: source name; its scales have dtype ``x_sf`` (None: plain values) and blocks ``x_block``.
        sf: dtype of the scales of the result, of blocks ``sf_block``; None: the result is not quantised. Scale 0 gives
            codes 0.
        stochastic: round with random bits of the state.
    """
    read = source(x, aligned)
    load_factor = block_factor(x_sf, *x_block)
    load_scale = block_factor(sf, *sf_block)
    write = rounding_writer(fmt, aligned, stochastic)
    out_dtype, out_bytes = stored_as(fmt)

    tokens, width = T.dynamic("tokens"), T.dynamic("width")
    x_stride = T.dynamic("x_stride", "int64")
    x_rows, x_blocks, rows_, blocks = T.dynamic("x_rows"), T.dynamic("x_blocks"), T.dynamic("rows"), T.dynamic("blocks")
    x_sf_0, x_sf_1 = T.dynamic("x_sf_0", "int64"), T.dynamic("x_sf_1", "int64")
    sf_0, sf_1 = T.dynamic("sf_0", "int64"), T.dynamic("sf_1", "int64")

    @T.prim_func
    def rescale(
        values: T.StridedTensor((tokens, width), (x_stride, 1), read.dtype),
        values_sf: T.StridedTensor((x_rows, x_blocks), (x_sf_0, x_sf_1), x_sf or "float32"),
        scales: T.StridedTensor((rows_, blocks), (sf_0, sf_1), sf or "float32"),
        out: T.Tensor((tokens, width // read.columns * out_bytes), out_dtype),
        state: T.Tensor((1,), "int64"),
    ):
        with T.Kernel(*grid(width // read.columns, tokens), threads=32 * WARPS) as (bx, by, bz):
            T.assume(width % read.columns == 0)
            thread = T.get_thread_binding()
            octets = width // read.columns
            row = row_of(by, bz, thread)
            octet = first_octet(bx, thread)
            raw = T.alloc_local((HALVES * read.columns,), read.dtype)
            factor = T.alloc_local((HALVES,), "float32")
            scale = T.alloc_local((HALVES,), "float32")
            eight = T.alloc_local((OCTET,), "float32")
            if row < tokens:
                # Lanes past the edge load and store once more what its last ones do: no load waits behind a branch.
                for h in T.unroll(HALVES):
                    at = T.min(octet + h * 32, octets - 1)
                    read.load(values, row, at, raw, h)
                    load_factor(values_sf, row, at, factor, h)
                    load_scale(scales, row, at, scale, h)
                for h in T.unroll(HALVES):
                    read.decode(raw, h, eight)
                    if sf is not None:
                        if scale[h] == T.float32(0.0):
                            factor[h] = T.float32(0.0)
                            for i in T.unroll(OCTET):
                                eight[i] = T.float32(0.0)
                        else:
                            factor[h] = factor[h] * (T.float32(1.0) / scale[h])
                    write(out, row, T.min(octet + h * 32, octets - 1), octets, eight, factor[h], state)

    return rescale
