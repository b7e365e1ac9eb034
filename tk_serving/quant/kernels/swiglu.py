"""SwiGLU of [N, 2 H]: plain or quantised by groups of columns (``by_group``), or with one scale a row (``by_row``).

A row is dead (zero data and scales, not counted) where its expert is missing, and zero (a row of zeros with the scales
of zeros) where its token is. A dead row is not read from memory, unless there are few rows.
"""

from typing import NamedTuple

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, bits_of, float_of, fmax, octet_writer, stored_as, view
from tk_serving.quant.kernels.scales import STORED, mode_of, scale_rule
from tk_serving.quant.kernels.sources import SIZES, source, words_of
from tk_serving.quant.kernels.tiles import (
    OCTETS,
    WARPS,
    first_octet,
    grid,
    group_scales,
    max_of_row,
    row_of,
    sf_tensor,
)
from tk_serving.quant.scales import COLUMN, E4M3_COLUMN, PACKED, ROW

DEAD, LIVE, ZERO = 0, 1, 2
FEW = 512
"""Up to so many rows dead ones are loaded as well: to know which they are takes longer."""
AHEAD = 3
"""Where a warp takes one half, so many routing weights a lane are loaded at once with the positions."""
FULL = 0xFFFFFFFF
LOCAL_MEMORY = {
    "by_group": "16 bytes on sm_100a, at the register bound that keeps enough warps on an SM; none on sm_90a"
}


def is_written(state, zero_padding):
    return True if zero_padding else state != DEAD


def is_read(state, counters):
    return state != DEAD if counters else state == LIVE


def octets_inside(octet, octets, halves):
    """How many of a lane's octets are in the row."""
    first = T.cast(octet < octets, "int32")
    return first if halves == 1 else first + T.cast(octet + 32 < octets, "int32")


class Rows(NamedTuple):
    """Run-time arguments that decide the state and the weight of a row."""

    positions: object
    weights: object
    experts: object
    psum: object
    factor: object
    alignment: object


def row_reader(weights, padding, ahead=0):
    """Macros ``prepare(given, row, rows, lane, state, place, at)`` and, to follow it, ``weigh(given, row, state, place,
    weight, at)``: state[at] and weight[at] of a row.

    With ``ahead`` another pair for ``at`` 0: ``hold(given, lane, held)`` loads so many of the first routing weights
    into each lane, before it is known which one the row has; ``weigh_held(..., held)`` takes it from there if it can.

    Args:
        weights: ``topk`` (of the flat routing weights, by position), ``row`` (one for each row, times a factor),
            ``factor`` (that alone), or None.
        padding: ``expert`` (rows with a negative expert id), ``psum`` (rows outside every expert's interval), or None.
    """

    @T.macro
    def owned(psum, row, alignment, lane, found):
        """found[0] = 1 where an expert's interval [psum of its predecessor, aligned; its psum) holds the row."""
        hit = T.alloc_local((1,), "int32")
        start = T.alloc_local((1,), "int32")
        hit[0] = 0
        for k in T.serial(T.ceildiv(psum.shape[0], 32)):
            if k * 32 + lane < psum.shape[0]:
                start[0] = 0
                if k + lane > 0:  # TileLang 0.1.12 turns k * 32 + lane > 0 into k > 0
                    start[0] = T.ceildiv(psum[k * 32 + lane - 1], alignment) * alignment
                if start[0] <= row and row < psum[k * 32 + lane]:
                    hit[0] = 1
        found[0] = T.call_extern("int32", "__reduce_max_sync", T.uint32(FULL), hit[0])

    @T.macro
    def prepare(given, row, rows, lane, state, place, at):
        """state[at]: whether the row is padding; place[at]: the position of its weight."""
        found = T.alloc_local((1,), "int32")
        state[at] = DEAD
        place[at] = 0
        found[0] = 1
        if padding == "psum":
            owned(given.psum, row, given.alignment, lane, found)
        if row < rows and found[0] != 0:
            state[at] = LIVE
            if weights == "topk":
                place[at] = given.positions[row]
            if padding == "expert":
                if given.experts[row] < 0:
                    state[at] = DEAD

    @T.macro
    def weigh(given, row, state, place, weight, at):
        """weight[at] of a row; the state of a row without a token. Comes after the loads of the row, which need not
        wait for it."""
        weight[at] = T.float32(1.0)
        if state[at] == LIVE:
            if weights == "topk":
                flat = T.Tensor((given.weights.shape[0] * given.weights.shape[1],), "float32", given.weights.data)
                state[at] = ZERO
                if place[at] >= 0 and place[at] < flat.shape[0]:
                    state[at] = LIVE
                    weight[at] = flat[place[at]]
            elif weights == "row":
                weight[at] = given.weights[row] * given.factor
            elif weights == "factor":
                weight[at] = given.factor

    @T.macro
    def hold(given, lane, held):
        flat = T.Tensor((given.weights.shape[0] * given.weights.shape[1],), "float32", given.weights.data)
        for k in T.unroll(ahead):
            held[k] = flat[T.min(T.cast(k * 32 + lane, "int32"), flat.shape[0] - 1)]

    @T.macro
    def weigh_held(given, state, place, weight, held):
        flat = T.Tensor((given.weights.shape[0] * given.weights.shape[1],), "float32", given.weights.data)
        one = T.alloc_local((1,), "float32")
        weight[0] = T.float32(1.0)
        for k in T.unroll(ahead):
            one[0] = T.shfl_sync(held[k], place[0] % 32, 32)
            if place[0] // 32 == k:
                weight[0] = one[0]
        if place[0] >= 32 * ahead and place[0] < flat.shape[0]:
            weight[0] = flat[place[0]]
        if state[0] == LIVE and (place[0] < 0 or place[0] >= flat.shape[0]):
            state[0] = ZERO
            weight[0] = T.float32(1.0)

    return (prepare, weigh, hold, weigh_held) if ahead else (prepare, weigh)


HELPERS = """
__device__ __forceinline__ float tks_ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ int tks_min_nan(int a, int b) {
  int y;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ int tks_max_nan(int a, int b) {
  int y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ int tks_max_size(int a, int b) {
  int y;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
"""
"""For two bfloat16 in a word. ``tks_max_size``: the larger magnitude, with any sign; NaN only of two."""
ROUNDING = 12582912.0  # 1.5 * 2^23: a sum with it is an integer
LOG2E_PART = 0.005724980030208826  # log2(e) / 252, as expf has it
LOG2E, LOG2E_REST = 1.4426950216293335, 1.925963033500011e-08
LARGEST_WEIGHT = (127 + 64) << 23
"""Bits of 2^64. Up to this size a weight times a limited y is finite, and its product with a power of two exact."""


@T.macro
def short_exp(x, result):
    """result[0] = expf(x) for x up to 64 in magnitude, in its steps, but the power of two is added to the exponent.

    One step less, the product with log2(e) rounded down at once, has another integer part for x from -2.6e-6 to 0, and
    another last bit of 1 + exp(x) for some.
    """
    turns = T.alloc_local((1,), "float32")
    rest = T.alloc_local((1,), "float32")
    turns[0] = T.ieee_fmaf(x, T.float32(LOG2E_PART), T.float32(0.5))
    turns[0] = T.ieee_fmaf(turns[0], T.float32(252.0), T.float32(ROUNDING - 126.0), "rd")
    rest[0] = T.ieee_fmaf(x, T.float32(LOG2E), -(turns[0] - T.float32(ROUNDING)))
    rest[0] = T.ieee_fmaf(x, T.float32(LOG2E_REST), rest[0])
    result[0] = float_of(bits_of(T.call_extern("float32", "tks_ex2", rest[0])) + (bits_of(turns[0]) << 23))


LARGEST_GATE = 64.0
"""Up to this magnitude of the gate the branch-free division covers 1 + exp(-gate)."""


@T.macro
def reciprocal(b, refined, r):
    """r[0] = about 1 / b, for b from 1 to 2^96; with ``refined`` to the last bit or the one before."""
    r[0] = T.fast_rcp(b)
    if refined:
        rest = T.alloc_local((1,), "float32")
        rest[0] = T.ieee_fmaf(-b, r[0], T.float32(1.0))
        r[0] = T.ieee_fmaf(r[0], rest[0], r[0])


@T.macro
def divide(a, b, r, quotient):
    """quotient[0] = a / b as IEEE rounds it, without a branch; r is the reciprocal of b.

    For b from 1 to 2^96 and an a that is 0 or has a normal quotient: the sequence that the compiler uses for such
    operands, but not its test for the others, a branch behind which it would hold back all that follows. It refines the
    reciprocal; where b depends on a bfloat16 a the approximate one is enough: tests/gpu tries all of them.
    The remainder is negated, so that the quotient of -0 is -0.
    """
    rest = T.alloc_local((1,), "float32")
    quotient[0] = a * r
    rest[0] = T.ieee_fmaf(b, quotient[0], -a)
    quotient[0] = T.ieee_fmaf(-rest[0], r, quotient[0])


def limited(value, limit):
    """``value`` cut to [-limit, limit]; NaN stays."""
    cut = float_of((bits_of(value) & T.int32(-0x80000000)) | bits_of(limit))
    return T.if_then_else(T.abs(value) > limit, cut, value)


def rounded_to_bfloat16(value):
    return T.cast(T.cast(value, "bfloat16"), "float32")


@T.macro
def largest_size(words, at, count, largest):
    """largest[0] = the largest magnitude of the bfloat16 gates of ``count`` octets from ``at``, but NaN."""
    pair = T.alloc_local((1,), "int32")
    pair[0] = words[0][8 * at]
    for i in T.unroll(4 * count - 1):
        pair[0] = T.call_extern("int32", "tks_max_size", pair[0], words[0][8 * (at + (i + 1) // 4) + (i + 1) % 4])
    largest[0] = fmax(T.abs(float_of(pair[0] << 16)), T.abs(float_of(pair[0] & T.int32(-0x10000))))


@T.macro
def limit_pairs(words, at, count, limit):
    """Limits gates and ups of ``count`` octets from ``at`` where they are; ``limit`` is a bfloat16. NaN stays."""
    ends = T.alloc_local((2,), "int32")
    ends[0] = T.int32(0x10001) * (bits_of(limit) >> 16)
    ends[1] = ends[0] | T.int32(-0x7FFF8000)
    for k in T.unroll(count):
        for i in T.unroll(4):
            words[0][8 * (at + k) + i] = T.call_extern("int32", "tks_min_nan", words[0][8 * (at + k) + i], ends[0])
            words[0][8 * (at + k) + 4 + i] = T.call_extern(
                "int32",
                "tks_max_nan",
                T.call_extern("int32", "tks_min_nan", words[0][8 * (at + k) + 4 + i], ends[0]),
                ends[1],
            )


def activation(count, weighted, clamp, counters, x, rounded=False, lean=False):
    """Macro ``activate(raw, at, octets, state, weight, limit, y, counts)``: y[8 at ...], so far 0, of the ``count``
    octets from ``at`` of a row.

    ``raw`` holds the gates of octet k at 2 k, its ups at 2 k + 1. ``octets`` of the ``count`` are in the row; the
    others are zeros. The limits apply by comparison, as NaN stays. ``rounded``: silu and its product with up are
    rounded to bfloat16, before the weight. One test for all octets leaves more independent work behind it than one for
    each. ``lean``: see ``by_group``.
    """
    read = source(x, True)

    def product(silu, up):
        return rounded_to_bfloat16(rounded_to_bfloat16(silu) * up) if rounded else silu * up

    @T.macro
    def limit_values(gate, up, limit):
        for i in T.unroll(OCTET):
            gate[i] = T.if_then_else(gate[i] > limit, limit, gate[i])
            up[i] = limited(up[i], limit)

    @T.macro
    def activate(raw, at, octets, state, weight, limit, y, counts):
        gate = T.alloc_local((OCTET,), "float32")
        up = T.alloc_local((OCTET,), "float32")
        most = T.alloc_local((1,), "float32")
        largest = T.alloc_local((1,), "float32")
        below = T.alloc_local((1,), "float32")
        r = T.alloc_local((1,), "float32")
        quotient = T.alloc_local((1,), "float32")
        if is_read(state, counters):
            largest[0] = T.float32(0.0)
            if lean:
                largest_size(words_of(raw, x), at, count, largest)
            else:
                for k in T.unroll(count):
                    read.maximum(raw, 2 * (at + k), most)
                    largest[0] = fmax(largest[0], most[0])
            if counters:
                for k in T.unroll(count):
                    read.decode(raw, 2 * (at + k), gate)
                    read.decode(raw, 2 * (at + k) + 1, up)
                    for i in T.unroll(OCTET):
                        counts[0] = counts[0] + T.cast(gate[i] > limit, "int32")
                        counts[1] = counts[1] + T.cast(up[i] > limit, "int32")
                        counts[2] = counts[2] + T.cast(up[i] < -limit, "int32")
                if counters == 4:
                    counts[3] = counts[3] + OCTET * octets
            if lean:
                limit_pairs(words_of(raw, x), at, count, limit)
            if largest[0] <= T.float32(LARGEST_GATE):
                for k in T.unroll(count):
                    read.decode(raw, 2 * (at + k), gate)
                    read.decode(raw, 2 * (at + k) + 1, up)
                    if clamp and not lean:
                        limit_values(gate, up, limit)
                    for i in T.unroll(OCTET):
                        if lean:
                            short_exp(-gate[i], below)
                            below[0] = T.float32(1.0) + below[0]
                        else:
                            below[0] = T.float32(1.0) + T.exp(-gate[i])
                        reciprocal(below[0], x == "float32", r)
                        divide(gate[i], below[0], r[0], quotient)
                        y[(at + k) * OCTET + i] = product(quotient[0], up[i])
            else:
                for k in T.unroll(count):
                    read.decode(raw, 2 * (at + k), gate)
                    read.decode(raw, 2 * (at + k) + 1, up)
                    if clamp and not lean:
                        limit_values(gate, up, limit)
                    for i in T.unroll(OCTET):
                        y[(at + k) * OCTET + i] = product(gate[i] / (T.float32(1.0) + T.exp(-gate[i])), up[i])
            if weighted:
                for i in T.unroll(OCTET * count):
                    y[at * OCTET + i] = y[at * OCTET + i] * weight
        if counters:
            if state == ZERO:
                for i in T.unroll(OCTET * count):
                    y[at * OCTET + i] = T.float32(0.0)

    return activate


def count_reporter(counters, warps):
    """Macro ``report(counts, totals, thread)`` that adds the counts of a block to the totals."""

    @T.macro
    def report(counts, totals, thread):
        shared = T.alloc_shared((warps, counters), "int32")
        for c in T.unroll(counters):
            for step in T.unroll(5):
                counts[c] = counts[c] + T.shfl_xor(counts[c], 1 << step)
        if thread % 32 == 0:
            for c in T.unroll(counters):
                shared[thread // 32, c] = counts[c]
        T.sync_threads()
        if thread < counters:
            counts[0] = 0
            for w in T.unroll(warps):
                counts[0] = counts[0] + shared[w, thread]
            if counts[0] > 0:
                T.atomic_add(totals[thread], T.cast(counts[0], "int64"))

    return report


def weights_tensor(mode, rows):
    return T.Tensor((rows,) if mode == "row" else (T.dynamic("tokens"), T.dynamic("topk")), "float32")


def padding_scales(npc, layout, warps):
    """Macro ``clear(sf, stride, row, rows, warp, part, state)``: the scales of a lane's row in the columns of this
    ``part`` become 0 if it is dead; ``warps`` warps with the same rows take turns at the columns."""
    dtype = STORED[layout]
    column_major = layout in (COLUMN, PACKED, E4M3_COLUMN)
    columns = max(1, OCTETS * OCTET // (npc * (4 if layout == PACKED else 1)))  # of scales, in a part

    @T.macro
    def clear(sf, stride, row, rows, warp, part, state):
        for i in T.unroll((columns + warps - 1) // warps):
            column = i * warps + warp
            if state == DEAD and column < columns and part * columns + column < sf.shape[1]:
                if column_major:
                    by_column = view(sf, (sf.shape[1], stride), dtype)
                    if row < stride:
                        by_column[0][part * columns + column, row] = T.cast(0, dtype)
                elif row < rows:
                    sf[row, part * columns + column] = T.cast(0, dtype)

    return clear


def by_group(
    x, fmt, npc, layout, round_sf, weights, padding, clamp, counters, aligned, rounded, halves, shared_rows, lean=False
):
    """One scale for ``npc`` = 32, 64 or 128 columns; 0 writes bfloat16 or float32.

    Args:
        halves: of a tile; one, for few rows, gives the same work to twice the warps.
        shared_rows: 0 writes all rows. Otherwise dead rows of the data stay as they are, while their scales are 0 all
            the same. Most may be dead then, so a block looks through so many rows at once, 32 or 128, and its warps
            take turns at the live ones.
        lean: the same bits with fewer instructions, of bfloat16 x with a limit that is one and at most 2^31, not
            counted: limits by pairs, ``short_exp``, and one product with the weight for each group, whose scale is
            rounded (a power of two, so both ways round once) and at least that of the format's floor.
    """
    zero_padding = not shared_rows
    each = 1 if zero_padding else shared_rows // WARPS
    ahead = AHEAD if weights == "topk" and halves == 1 else 0
    prepare, weigh, *held_weights = row_reader(weights, padding, ahead)
    hold, weigh_held = held_weights or (None, None)
    folded = bool(lean and npc and weights is not None)
    activate = activation(halves, weights is not None and not folded, clamp, counters, x, rounded, lean)
    report = count_reporter(counters, WARPS)
    read, values_of = source(x, aligned), source("float32", True).decode
    write = octet_writer(fmt, aligned)
    scales = group_scales(fmt, npc, layout, round_sf, halves=halves, divided=not lean) if npc else None
    clear_scales = None if zero_padding else padding_scales(npc, layout, WARPS * 32 // shared_rows)
    words_of_half = 2 * OCTET * SIZES[x] // 4
    out_dtype, out_bytes = stored_as(fmt)
    column_major = layout in (COLUMN, PACKED, E4M3_COLUMN)
    # Blocks on an SM; without, the compiler takes registers for 5 to 7.
    resident = 8 if not (npc and zero_padding) else 10
    if x == "float32" or counters:
        resident = 0 if zero_padding else 8
    n, width, blocks = T.dynamic("rows"), T.dynamic("width"), T.dynamic("blocks")
    stride, num_experts = T.dynamic("stride", "int64"), T.dynamic("num_experts")

    @T.macro
    def load(values, raw, row, n, octet, octets, wanted):
        # One condition for each half: a branch around both is a second one that the loads wait for.
        for h in T.unroll(halves):
            if wanted and row < n and octet + h * 32 < octets:
                read.load(values, row, octet + h * 32, raw, 2 * h)
                read.load(values, row, octets + octet + h * 32, raw, 2 * h + 1)

    @T.macro
    def finish(raw, state, weight, data, sf, stride, row, n, octet, octets, limit, floor, counts):
        """What follows the loads of a row."""
        y = T.alloc_local((halves * OCTET,), "float32")
        amax = T.alloc_local((halves,), "float32")
        inverse = T.alloc_local((halves,), "float32")
        eight = T.alloc_local((OCTET,), "float32")
        words = words_of(raw, x)  # zeros of parts of a word have other branches, and the kernel takes longer
        for h in T.unroll(halves):
            if octet + h * 32 >= octets:
                for i in T.unroll(words_of_half):
                    words[0][h * words_of_half + i] = 0
        for i in T.unroll(halves * OCTET):
            y[i] = T.float32(0.0)
        present = octets_inside(octet, octets, halves)
        activate(raw, 0, present, state[0], weight[0], limit, y, counts)
        if folded:
            # Of bits, as NaN belongs to the larger ones, and TileLang turns not (a <= b) into a > b.
            if (bits_of(weight[0]) & T.int32(0x7FFFFFFF)) > T.int32(LARGEST_WEIGHT):
                for i in T.unroll(halves * OCTET):
                    y[i] = y[i] * weight[0]
                weight[0] = T.float32(1.0)
        for h in T.unroll(halves):
            amax[h] = T.float32(0.0)
            for i in T.unroll(OCTET):
                amax[h] = fmax(amax[h], T.abs(y[h * OCTET + i]))
            if folded:
                amax[h] = amax[h] * T.abs(weight[0])
        if npc:
            scales(amax, inverse, sf, stride, row, octet, octets, n, state, floor)
        for h in T.unroll(halves):
            if row < n and octet + h * 32 < octets:
                values_of(y, h, eight)
                if folded:
                    inverse[h] = inverse[h] * weight[0]
                write(data, row, octet + h * 32, eight, inverse[h] if npc else T.float32(1.0))

    @T.macro
    def convert(given, values, data, sf, stride, row, n, octet, octets, lane, limit, floor, counts):
        """One row of the tile."""
        state = T.alloc_local((1,), "int32")
        place = T.alloc_local((1,), "int32")
        weight = T.alloc_local((1,), "float32")
        raw = T.alloc_local((2 * halves * OCTET,), x)
        held = T.alloc_local((max(1, ahead),), "float32")
        if ahead:
            hold(given, lane, held)
        prepare(given, row, n, lane, state, place, 0)
        if padding is None or n <= FEW:
            load(values, raw, row, n, octet, octets, True)
        else:
            load(values, raw, row, n, octet, octets, state[0] != DEAD)
        if ahead:
            weigh_held(given, state, place, weight, held)
        else:
            weigh(given, row, state, place, weight, 0)
        finish(raw, state, weight, data, sf, stride, row, n, octet, octets, limit, floor, counts)

    @T.macro
    def convert_live(given, values, data, sf, stride, first, n, octet, octets, thread, part, limit, floor, counts):
        """The live rows of a block's: each lane looks at one of them, then a warp takes every ``WARPS``-th live one."""
        lane = thread % 32
        warp = thread // 32
        states = T.alloc_local((1,), "int32")
        places = T.alloc_local((1,), "int32")
        weights_of_lanes = T.alloc_local((1,), "float32")
        state = T.alloc_local((1,), "int32")
        weight = T.alloc_local((1,), "float32")
        left = T.alloc_local((1,), "uint32")  # a bit for each row
        at = T.alloc_local((1,), "int32")
        row = T.alloc_local((1,), "int64")  # a variable: an expression is slow to compile in place
        raw = T.alloc_local((2 * halves * OCTET,), x)
        prepare(given, first + lane, n, lane, states, places, 0)
        left[0] = T.call_extern("uint32", "__ballot_sync", T.uint32(FULL), T.cast(states[0] != DEAD, "int32"))
        clear_scales(sf, stride, first + lane, n, warp, part, states[0])
        weigh(given, first + lane, states, places, weights_of_lanes, 0)
        for i in T.unroll(WARPS - 1):
            if i < warp:
                left[0] = left[0] & (left[0] - T.uint32(1))
        while left[0] != T.uint32(0):
            at[0] = T.call_extern("int32", "__ffs", T.cast(left[0], "int32")) - 1
            row[0] = first + at[0]
            load(values, raw, row[0], n, octet, octets, True)
            state[0] = T.shfl_sync(states[0], at[0], 32)
            weight[0] = T.shfl_sync(weights_of_lanes[0], at[0], 32)
            finish(raw, state, weight, data, sf, stride, row[0], n, octet, octets, limit, floor, counts)
            for _ in T.unroll(WARPS):
                left[0] = left[0] & (left[0] - T.uint32(1))

    @T.macro
    def convert_listed(given, values, data, sf, stride, first, n, octet, octets, thread, part, limit, floor, counts):
        """The same of as many rows as the block has threads, each of which looks at one and lists it if it is live."""
        lane = thread % 32
        warp = thread // 32
        states = T.alloc_local((1,), "int32")
        places = T.alloc_local((1,), "int32")
        weight_of_thread = T.alloc_local((1,), "float32")
        mask = T.alloc_local((1,), "uint32")
        at = T.alloc_local((1,), "int32")
        total = T.alloc_local((1,), "int32")
        state = T.alloc_local((1,), "int32")
        weight = T.alloc_local((1,), "float32")
        row = T.alloc_local((1,), "int64")
        raw = T.alloc_local((2 * halves * OCTET,), x)
        live_rows = T.alloc_shared((32 * WARPS,), "int32")
        live_states = T.alloc_shared((32 * WARPS,), "int32")
        live_weights = T.alloc_shared((32 * WARPS,), "float32")
        of_warps = T.alloc_shared((WARPS,), "int32")
        prepare(given, first + thread, n, lane, states, places, 0)
        mask[0] = T.call_extern("uint32", "__ballot_sync", T.uint32(FULL), T.cast(states[0] != DEAD, "int32"))
        if lane == 0:
            of_warps[warp] = T.call_extern("int32", "__popc", mask[0])
        T.sync_threads()
        before = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
        at[0] = T.call_extern("int32", "__popc", mask[0] & before)
        total[0] = 0
        for w in T.unroll(WARPS):
            if w < warp:
                at[0] = at[0] + of_warps[w]
            total[0] = total[0] + of_warps[w]
        clear_scales(sf, stride, first + thread, n, 0, part, states[0])
        weigh(given, first + thread, states, places, weight_of_thread, 0)
        if states[0] != DEAD:
            live_rows[at[0]] = T.cast(thread, "int32")
            live_states[at[0]] = states[0]
            live_weights[at[0]] = weight_of_thread[0]
        T.sync_threads()
        for i in T.serial(T.ceildiv(total[0] - warp, WARPS)):
            row[0] = first + live_rows[i * WARPS + warp]
            load(values, raw, row[0], n, octet, octets, True)
            state[0] = live_states[i * WARPS + warp]
            weight[0] = live_weights[i * WARPS + warp]
            finish(raw, state, weight, data, sf, stride, row[0], n, octet, octets, limit, floor, counts)

    convert_shared = convert_live if shared_rows == 32 else convert_listed

    @T.prim_func
    def swiglu(
        values: T.Tensor((n, width), x),
        positions: T.Tensor((n,), "int32"),
        row_weights: weights_tensor(weights, n),
        experts: T.Tensor((n,), "int32"),
        psum: T.Tensor((num_experts,), "int32"),
        totals: T.Tensor((max(1, counters),), "int64"),
        data: T.Tensor((n, width // (2 * OCTET) * out_bytes), out_dtype),
        sf: sf_tensor(layout, n, blocks, stride),
        limit: T.float32,
        floor: T.float32,
        factor: T.float32,
        alignment: T.int32,
    ):
        padded = stride if column_major else n
        with T.Kernel(*grid(width // (2 * OCTET), T.ceildiv(padded, each), halves), threads=32 * WARPS) as (bx, by, bz):
            if lean:
                T.import_source(HELPERS)
            if resident:
                T.annotate_min_blocks_per_sm(resident)
            T.assume(width % (2 * OCTET) == 0)
            thread = T.get_thread_binding()
            octets = width // (2 * OCTET)
            octet = first_octet(bx, thread, halves)
            given = Rows(positions, row_weights, experts, psum, factor, alignment)
            counts = T.alloc_local((4,), "int32")
            for c in T.unroll(4):
                counts[c] = 0
            if zero_padding:
                row = row_of(by, bz, thread)
                convert(given, values, data, sf, stride, row, n, octet, octets, thread % 32, limit, floor, counts)
            else:
                first = row_of(by, bz, 0) * each
                convert_shared(
                    given, values, data, sf, stride, first, n, octet, octets, thread, bx, limit, floor, counts
                )
            if counters:
                report(counts, totals, thread)

    return swiglu


def by_row(x, fmt, round_sf, weights, padding, clamp, counters, warps, held, aligned, zero_padding, rounded):
    """One scale for each row, row-major; ``warps`` warps hold a row in registers, ``held`` octets in a lane."""
    prepare, weigh = row_reader(weights, padding)
    activate = activation(1, weights is not None, clamp, counters, x, rounded)
    report = count_reporter(counters, WARPS if warps == 1 else warps)
    read, values_of = source(x, aligned), source("float32", True).decode
    write = octet_writer(fmt, aligned)
    rule = scale_rule(fmt, mode_of(ROW, round_sf))
    out_dtype, out_bytes = stored_as(fmt)
    rows = WARPS if warps == 1 else 1
    lanes = 32 * warps
    n, width, num_experts = T.dynamic("rows"), T.dynamic("width"), T.dynamic("num_experts")

    @T.prim_func
    def swiglu(
        values: T.Tensor((n, width), x),
        positions: T.Tensor((n,), "int32"),
        row_weights: weights_tensor(weights, n),
        experts: T.Tensor((n,), "int32"),
        psum: T.Tensor((num_experts,), "int32"),
        totals: T.Tensor((max(1, counters),), "int64"),
        data: T.Tensor((n, width // (2 * OCTET) * out_bytes), out_dtype),
        sf: T.Tensor((n, 1), "float32"),
        limit: T.float32,
        floor: T.float32,
        factor: T.float32,
        alignment: T.int32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=lanes * rows) as block:
            T.assume(width % (2 * OCTET) == 0)
            thread = T.get_thread_binding()
            octets = width // (2 * OCTET)
            row = block * rows + thread // lanes
            octet = thread % lanes
            given = Rows(positions, row_weights, experts, psum, factor, alignment)
            state = T.alloc_local((1,), "int32")
            place = T.alloc_local((1,), "int32")
            weight = T.alloc_local((1,), "float32")
            raw = T.alloc_local((2 * held * OCTET,), x)
            y = T.alloc_local((held * OCTET,), "float32")
            amax = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            eight = T.alloc_local((OCTET,), "float32")
            counts = T.alloc_local((4,), "int32")
            for c in T.unroll(4):
                counts[c] = 0
            amax[0] = T.float32(0.0)
            prepare(given, row, n, thread % 32, state, place, 0)
            for k in T.unroll(held):
                if state[0] != DEAD and row < n and octet + k * lanes < octets:
                    read.load(values, row, octet + k * lanes, raw, 2 * k)
                    read.load(values, row, octets + octet + k * lanes, raw, 2 * k + 1)
            weigh(given, row, state, place, weight, 0)
            for k in T.unroll(held):
                for i in T.unroll(OCTET):
                    y[k * OCTET + i] = T.float32(0.0)
                if state[0] != DEAD and octet + k * lanes < octets:
                    activate(raw, k, 1, state[0], weight[0], limit, y, counts)
                    for i in T.unroll(OCTET):
                        amax[0] = fmax(amax[0], T.abs(y[k * OCTET + i]))
            max_of_row(amax, thread, warps)
            rule(amax[0], floor, scale, inverse)
            if octet == 0 and row < n:
                sf[row, 0] = T.if_then_else(state[0] == DEAD, T.float32(0.0), scale[0])
            for k in T.unroll(held):
                if is_written(state[0], zero_padding) and row < n and octet + k * lanes < octets:
                    values_of(y, k, eight)
                    write(data, row, octet + k * lanes, eight, inverse[0])
            if counters:
                report(counts, totals, thread)

    return swiglu
