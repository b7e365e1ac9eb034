"""Casts with one scale for each column of 32 or 128 rows, as they are, gathered, of SwiGLU, and transposed.

A block takes 128 x 128 values. A thread holds 8 columns of 8 neighbouring rows: it loads 16 bytes at a time, and has
8 bytes of a row of the transposed result, which are put together in shared memory.
"""

import tilelang.language as T

from tk_serving.quant.formats import FORMATS
from tk_serving.quant.kernels.formats import OCTET, bits_of, fmax, octet_writer, view
from tk_serving.quant.kernels.scales import EXACT, ROUNDED, scale_rule
from tk_serving.quant.kernels.sources import block_factor, source
from tk_serving.quant.kernels.swiglu import LIVE, activation

SIZE = 128  # rows and columns of a tile
ACROSS = SIZE // OCTET  # threads in a row of the tile
THREADS = ACROSS * ACROSS
WARPS = THREADS // 32
AT_ONCE = 4  # rows of SwiGLU that are in flight


def build(x, npc, gathered, swiglu, clamp, npt, round_sf, packed, transposed, aligned):
    """Scales of blocks of ``npt`` rows and one column.

    Args:
        x: source name; codes have scales for groups of ``npc`` columns.
        gathered: row p is the input row positions[p], or zeros where that is out of range.
        swiglu: the values are silu(left half) * right half, rounded to bfloat16.
        packed: exponents of four blocks in an int32, instead of float32 scales.
    """
    read = source(x, aligned)
    load_factor = block_factor("float32" if x == "e4m3" else None, 1, npc)
    activate = activation(1, False, clamp, 0, "bfloat16")
    write = octet_writer("e4m3", True)
    rule = scale_rule("e4m3", ROUNDED if round_sf else EXACT)
    floor = FORMATS["e4m3"].floor
    groups = SIZE // npt
    warps = WARPS // groups  # of a group
    blocks = 2 if swiglu else 4  # on an SM; SwiGLU spills at four
    n, hidden, tokens, width = (T.dynamic(name) for name in ("rows", "hidden", "tokens", "width"))
    x_stride, x_sf_0, x_sf_1 = (T.dynamic(name, "int64") for name in ("x_stride", "x_sf_0", "x_sf_1"))
    x_blocks, stored = T.dynamic("x_blocks"), T.dynamic("stored")

    @T.macro
    def locate(positions, row, live, place, at):
        """place[at]: the input row of a row; live[at]: whether there is one."""
        place[at] = row
        live[at] = T.cast(row < n, "int32")
        if gathered:
            if row < n:
                place[at] = positions[row]
                live[at] = T.cast(place[at] >= 0 and place[at] < tokens, "int32")

    @T.macro
    def load_swiglu(values, octet, octets, live, place, raw, limit):
        both = T.alloc_local((2 * AT_ONCE * OCTET,), "bfloat16")
        y = T.alloc_local((AT_ONCE * OCTET,), "float32")
        counts = T.alloc_local((1,), "int32")
        for part in T.unroll(OCTET // AT_ONCE):
            for k in T.unroll(AT_ONCE):
                if live[part * AT_ONCE + k] != 0 and octet < octets:
                    read.load(values, place[part * AT_ONCE + k], octet, both, 2 * k)
                    read.load(values, place[part * AT_ONCE + k], octets + octet, both, 2 * k + 1)
            for k in T.unroll(AT_ONCE):
                if live[part * AT_ONCE + k] != 0 and octet < octets:
                    activate(both, k, 1, LIVE, T.float32(1.0), limit, y, counts)
                    for i in T.unroll(OCTET):
                        raw[(part * AT_ONCE + k) * OCTET + i] = T.cast(y[k * OCTET + i], "bfloat16")

    @T.macro
    def store_scale(sf, scale, block, column):
        if packed:
            exponents = view(sf, (stored * hidden, 4), "uint8")
            place = T.alloc_local((1,), "int64")
            place[0] = T.cast(block // 4, "int64") * hidden + column
            exponents[0][place[0], block % 4] = T.cast(bits_of(scale[0]) >> 23, "uint8")
            if block == T.ceildiv(n, npt) - 1:
                for j in T.unroll(4):
                    if j > block % 4:
                        exponents[0][place[0], j] = T.cast(0, "uint8")
        else:
            sf[block, column] = scale[0]

    @T.prim_func
    def per_channel_cast(
        values: T.StridedTensor((tokens, width), (x_stride, 1), read.dtype),
        values_sf: T.StridedTensor((tokens, x_blocks), (x_sf_0, x_sf_1), "float32"),
        positions: T.Tensor((n,), "int32"),
        data: T.Tensor((hidden, n) if transposed else (n, hidden), "float8_e4m3fn"),
        sf: T.Tensor((stored, hidden), "int32" if packed else "float32"),
        limit: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, SIZE) * T.ceildiv(hidden, SIZE), threads=THREADS) as block:
            T.annotate_min_blocks_per_sm(blocks)
            T.assume(hidden % OCTET == 0)
            thread = T.get_thread_binding()
            octets = hidden // OCTET
            tiles = T.cast(T.ceildiv(hidden, SIZE), "int32")
            corner = T.alloc_local((2,), "int32")  # variables, or every use divides again
            corner[0] = T.cast(block, "int32") // tiles * SIZE
            corner[1] = T.cast(block, "int32") % tiles * SIZE
            top = corner[0]
            left = corner[1]
            across = thread % ACROSS
            down = thread // ACROSS
            octet = left // OCTET + across
            row = top + down * OCTET
            raw = T.alloc_local((OCTET * OCTET,), read.dtype)
            factor = T.alloc_local((OCTET,), "float32")
            live = T.alloc_local((OCTET,), "int32")
            place = T.alloc_local((OCTET,), "int32")
            eight = T.alloc_local((OCTET,), "float32")
            amax = T.alloc_local((OCTET,), "float32")
            inverse = T.alloc_local((OCTET,), "float32")
            scale = T.alloc_local((1,), "float32")
            multiplier = T.alloc_local((1,), "float32")
            largest = T.alloc_shared((WARPS, SIZE), "float32")
            multipliers = T.alloc_shared((groups, SIZE), "float32")
            for k in T.unroll(OCTET):
                locate(positions, row + k, live, place, k)
            if swiglu:
                load_swiglu(values, octet, octets, live, place, raw, limit)
            else:
                for k in T.unroll(OCTET):
                    if live[k] != 0 and octet < octets:
                        read.load(values, place[k], octet, raw, k)
                        load_factor(values_sf, place[k], octet, factor, k)
            for i in T.unroll(OCTET):
                amax[i] = T.float32(0.0)
            for k in T.unroll(OCTET):
                if live[k] != 0 and octet < octets:
                    read.decode(raw, k, eight)
                    for i in T.unroll(OCTET):
                        if npc:
                            eight[i] = eight[i] * factor[k]
                        amax[i] = fmax(amax[i], T.abs(eight[i]))
            for i in T.unroll(OCTET):
                amax[i] = fmax(amax[i], T.shfl_xor(amax[i], ACROSS))
            if thread % 32 < ACROSS:
                for i in T.unroll(OCTET):
                    largest[thread // 32, across * OCTET + i] = amax[i]
            T.sync_threads()
            for step in T.unroll(-(-groups * SIZE // THREADS)):
                group = (step * THREADS + thread) // SIZE
                column = thread % SIZE
                if group < groups:
                    amax[0] = T.float32(0.0)
                    for w in T.unroll(warps):
                        amax[0] = fmax(amax[0], largest[group * warps + w, column])
                    rule(amax[0], T.float32(floor), scale, multiplier)
                    multipliers[group, column] = multiplier[0]
                    if left + column < hidden and top + group * npt < n:
                        store_scale(sf, scale, top // npt + group, left + column)
            T.sync_threads()
            for i in T.unroll(OCTET):
                inverse[i] = multipliers[down * OCTET // npt, across * OCTET + i]
            if transposed:
                tile = T.alloc_shared((SIZE * ACROSS, 2), "int32")
                codes = T.alloc_local((OCTET,), "float8_e4m3fn")
                words = view(codes, (2,), "int32", scope="local")
                for i in T.unroll(OCTET):
                    for k in T.unroll(OCTET):
                        eight[k] = T.float32(0.0)
                        if live[k] != 0 and octet < octets:
                            eight[k] = T.cast(raw[k * OCTET + i], "float32") * inverse[i]
                    for k in T.vectorized(OCTET):
                        codes[k] = T.cast(eight[k], "float8_e4m3fn")
                    # Swizzled by column, so that neither side meets in one bank.
                    for j in T.vectorized(2):
                        tile[(across * OCTET + i) * ACROSS + (down ^ across), j] = words[0][j]
                T.sync_threads()
                rows = view(data, (hidden * (n // 16), 4), "int32")
                four = T.alloc_local((4,), "int32")
                word = T.alloc_local((1,), "int64")
                for step in T.unroll(SIZE * SIZE // 16 // THREADS):
                    column = (step * THREADS + thread) // (SIZE // 16)
                    at = thread % (SIZE // 16)
                    if left + column < hidden and top + at * 16 < n:
                        for h in T.unroll(2):
                            for j in T.vectorized(2):
                                four[2 * h + j] = tile[column * ACROSS + ((2 * at + h) ^ (column // OCTET)), j]
                        word[0] = T.cast(left + column, "int64") * (n // 16) + (top // 16 + at)
                        for j in T.vectorized(4):
                            rows[0][word[0], j] = four[j]
            else:
                for k in T.unroll(OCTET):
                    if row + k < n and octet < octets:
                        for i in T.unroll(OCTET):
                            eight[i] = T.float32(0.0)
                        if live[k] != 0:
                            read.decode(raw, k, eight)
                            for i in T.unroll(OCTET):
                                if npc:
                                    eight[i] = eight[i] * factor[k]
                                eight[i] = eight[i] * inverse[i]
                        write(data, row + k, octet, eight, T.float32(1.0))

    return per_channel_cast
