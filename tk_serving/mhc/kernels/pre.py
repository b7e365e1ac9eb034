"""From the parts of the pre-norm product to a sublayer's input, and to the mixes of its residual update.

Two kinds of blocks share the grid. A mixing block gives each token a warp: it adds the parts, applies the gates and
runs Sinkhorn (of few tokens in one thread for each), which takes time but no bandwidth. An input block gives one token
all its threads: it reads the streams while one warp computes the four pre mixes, sums the streams, and where asked
normalises and quantises the row, which has never left the registers. Mixing blocks are spread among the input blocks,
so that both resources are always in use.

Input blocks take the tokens from the last to the first: the streams of the last ones are still in the L2 cache from
the launch before.
"""

import tilelang.language as T

from tk_serving.mhc.kernels.mixes import MIXES, MULT, activate, inverse_rms, scale_index, sinkhorn, sinkhorn_of_lanes
from tk_serving.mhc.kernels.reduction import block_sums
from tk_serving.mhc.kernels.words import VALUES, pack, unpack
from tk_serving.quant.kernels.formats import bits_of, fmax, octet_writer
from tk_serving.quant.kernels.scales import STORED, default_floor, mode_of, scale_rule
from tk_serving.quant.kernels.tiles import sf_tensor
from tk_serving.quant.scales import PACKED, ROW

FEW = 64  # tokens up to which nothing but Sinkhorn decides when the launch ends
GATHERED, GIVEN = "gathered", "given"
"""Where the input comes from: the streams and the computed pre mixes, or a tensor that holds it."""


def shape(hidden: int) -> tuple[int, int]:
    """(threads, words of a thread) of an input block, which holds a whole row: up to 320, if that leaves none idle."""
    words = hidden // VALUES
    each = -(-words // 256)
    if words % 320 == 0:
        each = words // 320
    return -(-words // each // 32) * 32, each


def build(
    hidden: int,
    mixes: int,
    splits: int,
    source: str,
    with_pre: bool,
    norm: str,
    rms_before_rounding: bool,
    store: bool,
    fmt: str,
    npc: int,
    layout: str,
    round_sf: bool,
):
    """
    Args:
        mixes: 24, or 4 for the output head, which has pre mixes only.
        with_pre: also write the pre mixes.
        norm: dtype of the norm weight; empty: no normalisation.
        rms_before_rounding: a gathered row's RMS is taken in float32, before it is rounded.
        store: write the row in bfloat16. A given input that is neither normalised nor quantised is not touched.
        fmt, npc, layout, round_sf: quantise the row; ``fmt`` empty: do not.
    """
    words = hidden // VALUES
    threads, each = shape(hidden)
    warps = threads // 32
    streams = MULT if source == GATHERED else 1
    mixing = mixes == MIXES
    inputs = source == GATHERED or norm != "" or fmt != ""
    per_group = warps * inputs + mixing  # blocks that serve the same `warps` tokens
    groups = -(-hidden // npc) if fmt else 1
    lanes = npc // VALUES if fmt else 1
    normed, quantised = norm != "", fmt != ""
    if quantised:
        mode = mode_of(layout, round_sf)
        rule, floor, write = scale_rule(fmt, mode), default_floor(fmt, mode), octet_writer(fmt, True)
    tokens, stride = T.dynamic("tokens", "int64"), T.dynamic("stride", "int64")

    def given(present, rows):
        return rows if present else 1

    @T.macro
    def raw_mix(partial_mul, partial_sqr, scale, base, token, column, size, eps, z):
        """z[0] of a lane = scaled mix of its column. Parts are added in ascending order, all loads under way first."""
        parts = T.alloc_local((splits,), "float32")
        squares = T.alloc_local((splits,), "float32")
        for split in T.unroll(splits):
            parts[split] = partial_mul[split, token, column]
        for split in T.unroll(splits):
            squares[split] = partial_sqr[split, token]
        for split in T.unroll(1, splits):
            parts[0] = parts[0] + parts[split]
            squares[0] = squares[0] + squares[split]
        z[0] = parts[0] * inverse_rms(squares[0], size, eps)
        z[0] = z[0] * scale[scale_index(column)] + base[column]

    @T.macro
    def normalise(row_ints, halves, norm_weight, square, size, eps, shared, thread):
        """The row times its inverse RMS and the weight, in place; both are read in float32.

        ``square``: the thread's part of the square sum, so far 0 unless it was taken before the row was rounded.
        """
        value = T.alloc_local((VALUES,), "float32")
        factor = T.alloc_local((VALUES,), "float32")
        raw = T.alloc_local((VALUES,), norm)
        rstd = T.alloc_local((1,), "float32")
        if not rms_before_rounding:
            for w in T.unroll(each):
                if w * threads + thread < words:
                    unpack(row_ints, w * 4, value, 0)
                    for j in T.unroll(VALUES):
                        square[0] = T.ieee_fmaf(value[j], value[j], square[0])
        block_sums(square, 1, shared, thread, warps)
        rstd[0] = inverse_rms(shared[0, 0], size, eps)
        for w in T.unroll(each):
            if w * threads + thread < words:
                unpack(row_ints, w * 4, value, 0)
                for j in T.vectorized(VALUES):
                    raw[j] = norm_weight[(w * threads + thread) * VALUES + j]
                for j in T.vectorized(VALUES):
                    factor[j] = T.cast(raw[j], "float32")
                for j in T.unroll(VALUES):
                    value[j] = value[j] * rstd[0] * factor[j]
                pack(value, 0, halves, w * VALUES)

    @T.macro
    def store_scales(sf, shared_scale, token, stride, thread, padding):
        """The row's scales; rows of padding get zeros."""
        columns = (groups + 3) // 4 if layout == PACKED else groups
        word = T.alloc_local((1,), STORED[layout])
        if thread < columns:
            word[0] = 0
            if not padding:
                if layout == PACKED:
                    for i in T.unroll(4):
                        if thread * 4 + i < groups:
                            word[0] = word[0] | ((bits_of(shared_scale[thread * 4 + i]) >> 23) << (8 * i))
                else:
                    word[0] = shared_scale[thread]
            if layout == ROW:
                sf[token, thread] = word[0]
            else:
                storage = T.Tensor((columns, stride), STORED[layout], data=sf.data)
                storage[thread, token] = word[0]

    @T.macro
    def quantise(row_ints, data, sf, shared_scale, token, stride, thread):
        value = T.alloc_local((VALUES,), "float32")
        amax = T.alloc_local((1,), "float32")
        factor = T.alloc_local((1,), "float32")
        inverse = T.alloc_local((1,), "float32")
        for w in T.unroll(each):
            for j in T.unroll(VALUES):
                value[j] = 0.0
            if w * threads + thread < words:
                unpack(row_ints, w * 4, value, 0)
            amax[0] = 0.0
            for j in T.unroll(VALUES):
                amax[0] = fmax(amax[0], T.abs(value[j]))
            for step in T.unroll(lanes.bit_length() - 1):
                amax[0] = fmax(amax[0], T.shfl_xor(amax[0], 1 << step))
            rule(amax[0], T.float32(floor), factor, inverse)
            if w * threads + thread < words:
                write(data, token, w * threads + thread, value, inverse[0])
                if thread % lanes == 0:
                    shared_scale[(w * threads + thread) // lanes] = factor[0]
        T.sync_threads()
        store_scales(sf, shared_scale, token, stride, thread, False)

    @T.prim_func
    def pre(
        partial_mul: T.Tensor((splits, tokens, mixes), "float32"),
        partial_sqr: T.Tensor((splits, tokens), "float32"),
        scale: T.Tensor((3 if mixes == MIXES else 1,), "float32"),
        base: T.Tensor((mixes,), "float32"),
        x: T.Tensor((tokens, streams, hidden), "bfloat16"),
        norm_weight: T.Tensor((given(norm, hidden),), norm or "float32"),
        pre_mix: T.Tensor((given(with_pre, tokens), MULT), "float32"),
        post_mix: T.Tensor((given(mixing, tokens), MULT), "float32"),
        comb_mix: T.Tensor((given(mixing, tokens), MULT * MULT), "float32"),
        out: T.Tensor((given(store, tokens), hidden), "bfloat16"),
        data: T.Tensor((given(fmt, tokens), hidden), "float8_e4m3fn" if fmt else "bfloat16"),
        sf: sf_tensor(layout, tokens, (groups + 3) // 4 if layout == PACKED else groups, stride)
        if fmt
        else T.Tensor((1,), "float32"),
        padded: T.int64,
        size: T.float32,
        rms_eps: T.float32,
        pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        norm_eps: T.float32,
        repeat: T.int32,
    ):
        with T.Kernel(T.ceildiv(padded, warps) * per_group, threads=threads) as block:
            T.annotate_min_blocks_per_sm(3 if each * streams <= 8 else 2)
            thread = T.get_thread_binding()
            lane = thread % 32
            place = T.alloc_local((2,), "int32")  # group of tokens, and which of its blocks this is
            place[0] = T.cast(block, "int32") // per_group
            place[1] = T.cast(block, "int32") % per_group
            z = T.alloc_local((1,), "float32")
            if mixing and place[1] == per_group - 1:
                mix_token = T.cast(place[0], "int64") * warps + thread // 32
                combination = T.alloc_shared((warps, MULT * MULT), "float32")
                if mix_token < tokens:
                    # Lanes 0 ... 15 hold the combination, 16 ... 19 pre, 20 ... 23 post.
                    column = T.if_then_else(lane < 16, lane + 8, T.if_then_else(lane < 24, lane - 16, 0))
                    raw_mix(partial_mul, partial_sqr, scale, base, mix_token, column, size, rms_eps, z)
                    value = T.alloc_local((1,), "float32")
                    value[0] = activate(column, z[0], pre_eps, post_mult)
                    if with_pre:
                        if lane >= 16 and lane < 20:
                            pre_mix[mix_token, lane - 16] = value[0]
                    if lane >= 20 and lane < 24:
                        post_mix[mix_token, lane - 20] = value[0]
                    if tokens > FEW:
                        sinkhorn_of_lanes(value, repeat, sinkhorn_eps)
                        if lane < 16:
                            comb_mix[mix_token, lane] = value[0]
                    elif lane < 16:
                        combination[thread // 32, lane] = value[0]
                if tokens <= FEW:
                    T.sync_threads()
                    own_token = T.cast(place[0], "int64") * warps + thread
                    if thread < warps and own_token < tokens:
                        p = T.alloc_local((MULT * MULT,), "float32")
                        for i in T.unroll(MULT):
                            for j in T.vectorized(MULT):
                                p[MULT * i + j] = combination[thread, MULT * i + j]
                        sinkhorn(p, repeat, sinkhorn_eps)
                        for i in T.unroll(MULT):
                            for j in T.vectorized(MULT):
                                comb_mix[own_token, MULT * i + j] = p[MULT * i + j]
            else:
                token = padded - 1 - (T.cast(place[0], "int64") * warps + place[1])
                x_words = T.Tensor((tokens, streams, words), "int32x4", data=x.data)
                out_words = T.Tensor((given(store, tokens), words), "int32x4", data=out.data)
                loaded = T.alloc_local((each * streams,), "int32x4")
                ints = T.Tensor((each * streams * 4,), "int32", data=loaded.data, scope="local")
                row = T.alloc_local((each,), "int32x4")
                row_ints = T.Tensor((each * 4,), "int32", data=row.data, scope="local")
                halves = T.Tensor((each * VALUES,), "bfloat16", data=row.data, scope="local")
                value = T.alloc_local((VALUES,), "float32")
                total = T.alloc_local((VALUES,), "float32")
                weight = T.alloc_local((MULT,), "float32")
                square = T.alloc_local((1,), "float32")
                square[0] = 0.0
                shared_mix = T.alloc_shared((MULT,), "float32")
                shared = T.alloc_shared((warps, 1), "float32")
                shared_scale = T.alloc_shared((groups,), "float32")
                if token >= 0 and token < tokens:
                    for w in T.unroll(each):
                        if w * threads + thread < words:
                            for i in T.unroll(streams):
                                loaded[w * streams + i] = x_words[token, i, w * threads + thread]
                    if source == GATHERED:
                        if thread < 32:
                            raw_mix(partial_mul, partial_sqr, scale, base, token, lane % MULT, size, rms_eps, z)
                            if lane < MULT:
                                shared_mix[lane] = activate(lane, z[0], pre_eps, post_mult)
                        T.sync_threads()
                        for i in T.vectorized(MULT):
                            weight[i] = shared_mix[i]
                        for w in T.unroll(each):
                            if w * threads + thread < words:
                                for j in T.unroll(VALUES):
                                    total[j] = 0.0
                                for i in T.unroll(MULT):
                                    unpack(ints, (w * MULT + i) * 4, value, 0)
                                    for j in T.unroll(VALUES):
                                        total[j] = T.ieee_fmaf(weight[i], value[j], total[j])
                                if rms_before_rounding:
                                    for j in T.unroll(VALUES):
                                        square[0] = T.ieee_fmaf(total[j], total[j], square[0])
                                pack(total, 0, halves, w * VALUES)
                    else:
                        for w in T.unroll(each):
                            row[w] = loaded[w]
                    if normed:
                        normalise(
                            row_ints, halves, norm_weight, square, size / T.float32(MULT), norm_eps, shared, thread
                        )
                    if store:
                        for w in T.unroll(each):
                            if w * threads + thread < words:
                                out_words[token, w * threads + thread] = row[w]
                    if quantised:
                        quantise(row_ints, data, sf, shared_scale, token, stride, thread)
                elif quantised and token >= 0:  # a row of padding in column-major scales
                    store_scales(sf, shared_scale, token, stride, thread, True)

    return pre
