"""A lane has 16 channels of a head: two octets of one group of 128, so that eight lanes share a scale.

A block takes a few tokens at the same heads: their angles are loaded once, into shared memory, and their scales, which
lie side by side, are stored together.
"""

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, fmax, view
from tk_serving.quant.kernels.scales import ROUNDED, scale_rule
from tk_serving.quant.kernels.sources import source, words_of

LANES = 8  # of a group
OCTETS = 2  # of a lane


def build(
    head_dim: int, rope_dim: int, heads_per_group: int, positions: str, floor: float, tokens_each: int, threads: int
):
    """
    Args:
        positions: their dtype.
        floor: smallest maximum of a group.
        tokens_each: tokens of a block, 1, 2 or 4: the padding of a column of scales is a multiple of it.
    """
    read = source("bfloat16", True)
    rule = scale_rule("e4m3", ROUNDED, divided=False)
    lanes = head_dim // (OCTETS * OCTET)  # of a head
    rotated = (head_dim - rope_dim) // OCTET  # the first octet that is
    loads = -(-tokens_each * rope_dim // threads)  # of angles, of a thread
    both = rotated < head_dim // OCTET - LANES  # or no first octet of a lane is

    tokens, groups, rows = T.dynamic("tokens"), T.dynamic("groups"), T.dynamic("rows")
    heads, columns = groups * heads_per_group, groups * (heads_per_group * head_dim // (LANES * OCTETS * OCTET))
    token_stride, head_stride = T.dynamic("token_stride", "int64"), T.dynamic("head_stride", "int64")
    row_stride = T.dynamic("row_stride", "int64")
    padded = T.dynamic("padded")

    @T.macro
    def load_rows(at, first, thread, row):
        """The rows of the angles that a thread loads; without branches, behind which other loads would wait."""
        for k in T.unroll(loads):
            row[k] = T.cast(at[T.min(first + (k * threads + thread) // rope_dim, tokens - 1)], "int64")

    @T.macro
    def load_angles(cache, row, thread, conjugate, angles):
        """Cosines and sines of the block's tokens; of a row outside the cache those of the angle zero."""
        value = T.alloc_local((1,), "float32")
        for k in T.unroll(loads):
            place = k * threads + thread
            channel = place % rope_dim
            value[0] = cache[T.max(T.min(row[k], rows - 1), 0), channel]
            if row[k] < 0 or row[k] >= rows:
                value[0] = T.if_then_else(channel < rope_dim // 2, T.float32(1.0), T.float32(0.0))
            if conjugate != 0 and channel >= rope_dim // 2:
                value[0] = -value[0]
            if place < tokens_each * rope_dim:
                angles[place] = value[0]

    @T.macro
    def rotate(v, h, angles, i, octet):
        """The four pairs of an octet of the block's i-th token, if it is one of those."""
        cos = T.alloc_local((OCTET // 2,), "float32")
        sin = T.alloc_local((OCTET // 2,), "float32")
        pair = T.alloc_local((2,), "float32")
        if octet >= rotated:
            for j in T.vectorized(OCTET // 2):
                cos[j] = angles[i * rope_dim + (octet - rotated) * (OCTET // 2) + j]
            for j in T.vectorized(OCTET // 2):
                sin[j] = angles[i * rope_dim + rope_dim // 2 + (octet - rotated) * (OCTET // 2) + j]
            for j in T.unroll(OCTET // 2):
                pair[0] = v[h * OCTET + 2 * j]
                pair[1] = v[h * OCTET + 2 * j + 1]
                v[h * OCTET + 2 * j] = T.ieee_fmaf(pair[0], cos[j], -(pair[1] * sin[j]))
                v[h * OCTET + 2 * j + 1] = T.ieee_fmaf(pair[1], cos[j], pair[0] * sin[j])

    @T.prim_func
    def apply_rotary_and_per_token_cast(
        values: T.StridedTensor((tokens, heads, head_dim), (token_stride, head_stride, 1), "bfloat16"),
        cache: T.StridedTensor((rows, rope_dim), (row_stride, 1), "float32"),
        at: T.Tensor((tokens,), positions),
        data: T.Tensor((groups, tokens, heads_per_group * head_dim), "float8_e4m3fn"),
        sf: T.Tensor((columns, padded), "float32"),
        conjugate: T.int32,
    ):
        with T.Kernel(T.ceildiv(padded, tokens_each), T.ceildiv(heads * lanes, threads), threads=threads) as (
            tile,
            part,
        ):
            thread = T.get_thread_binding()
            first = tile * tokens_each
            item = part * threads + thread
            head = item // lanes
            octet = item % lanes // LANES * (LANES * OCTETS) + item % LANES
            angles = T.alloc_shared((tokens_each * rope_dim,), "float32")
            row = T.alloc_local((loads,), "int64")
            raw = T.alloc_local((tokens_each * OCTETS * OCTET,), "bfloat16")
            words = words_of(raw, "bfloat16")
            v = T.alloc_local((OCTETS * OCTET,), "float32")
            eight = T.alloc_local((OCTET,), "float32")
            amax = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            scales = T.alloc_local((tokens_each,), "float32")
            codes = T.alloc_local((OCTET,), "float8_e4m3fn")
            # The strides are written as multiples of the vector, which the compiler cannot know of arguments.
            strides = (token_stride // OCTET * 4, head_stride // OCTET * 4, 4, 1)
            octets = view(values, (tokens, heads, head_dim // OCTET, 4), "int32", strides)
            stored = view(data, (groups, tokens, heads_per_group * head_dim // OCTET, OCTET), "float8_e4m3fn")
            side_by_side = view(sf, (columns, padded // tokens_each, tokens_each), "float32")
            load_rows(at, first, thread, row)
            for i in T.unroll(tokens_each):
                if first + i < tokens and head < heads:
                    for h in T.unroll(OCTETS):
                        for w in T.vectorized(4):
                            words[0][(i * OCTETS + h) * 4 + w] = octets[0][first + i, head, octet + h * LANES, w]
            T.sync_warp()  # the compiler would wait for the rows before it has issued all loads above
            load_angles(cache, row, thread, conjugate, angles)
            T.sync_threads()
            for i in T.unroll(tokens_each):
                for h in T.unroll(OCTETS):
                    read.decode(raw, i * OCTETS + h, eight)
                    for j in T.unroll(OCTET):
                        v[h * OCTET + j] = eight[j]
                if both:
                    rotate(v, 0, angles, i, octet)
                rotate(v, 1, angles, i, octet + LANES)
                amax[0] = T.float32(0.0)
                for j in T.unroll(OCTETS * OCTET):
                    amax[0] = fmax(amax[0], T.abs(v[j]))
                for step in T.unroll(LANES.bit_length() - 1):
                    amax[0] = fmax(amax[0], T.shfl_xor(amax[0], 1 << step))
                rule(amax[0], T.float32(floor), scale, inverse)
                scales[i] = T.if_then_else(first + i < tokens, scale[0], T.float32(0.0))
                if first + i < tokens and head < heads:
                    for h in T.unroll(OCTETS):
                        for j in T.vectorized(OCTET):
                            codes[j] = T.cast(v[h * OCTET + j] * inverse[0], "float8_e4m3fn")
                        place = head % heads_per_group * (head_dim // OCTET) + octet + h * LANES
                        for j in T.vectorized(OCTET):
                            stored[0][head // heads_per_group, first + i, place, j] = codes[j]
            if item % LANES == 0 and head < heads:
                for i in T.vectorized(tokens_each):
                    side_by_side[0][item // LANES, tile, i] = scales[i]

    return apply_rotary_and_per_token_cast
