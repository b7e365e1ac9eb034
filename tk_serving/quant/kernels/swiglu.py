"""SwiGLU of [N, 2 H]: plain or quantised by groups of columns (``by_group``), or with one scale a row (``by_row``).

A row is dead (zero data and scales, not counted) where its expert is missing, and zero (a row of zeros with the scales
of zeros) where its token is. Neither is read from memory, unless clamped elements of a zero row are counted.
"""

from typing import NamedTuple

import tilelang.language as T

from tk_serving.quant.kernels.formats import OCTET, fmax, octet_writer, stored_as
from tk_serving.quant.kernels.scales import mode_of, scale_rule
from tk_serving.quant.kernels.sources import source
from tk_serving.quant.kernels.tiles import (
    HALVES,
    WARPS,
    first_octet,
    first_row,
    grid,
    group_scales,
    max_of_row,
    sf_tensor,
)
from tk_serving.quant.scales import COLUMN, E4M3_COLUMN, PACKED, ROW

DEAD, LIVE, ZERO = 0, 1, 2
FULL = 0xFFFFFFFF


def is_read(state, counters):
    return state != DEAD if counters else state == LIVE


class Rows(NamedTuple):
    """Run-time arguments that decide the state and the weight of a row."""

    positions: object
    weights: object
    experts: object
    psum: object
    factor: object
    alignment: object


def row_reader(weights, padding):
    """Macro ``prepare(given, row, rows, lane, state, weight, at)``: state[at] and weight[at] of a row.

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
    def prepare(given, row, rows, lane, state, weight, at):
        place = T.alloc_local((1,), "int32")
        found = T.alloc_local((1,), "int32")
        state[at] = DEAD
        weight[at] = T.float32(1.0)
        found[0] = 1
        if padding == "psum":
            owned(given.psum, row, given.alignment, lane, found)
        if row < rows and found[0] != 0:
            state[at] = LIVE
            if padding == "expert":
                if given.experts[row] < 0:
                    state[at] = DEAD
            if weights == "topk":
                if state[at] == LIVE:
                    flat = T.Tensor((given.weights.shape[0] * given.weights.shape[1],), "float32", given.weights.data)
                    place[0] = given.positions[row]
                    state[at] = ZERO
                    if place[0] >= 0 and place[0] < flat.shape[0]:
                        state[at] = LIVE
                        weight[at] = flat[place[0]]
            elif weights == "row":
                weight[at] = given.weights[row] * given.factor
            elif weights == "factor":
                weight[at] = given.factor

    return prepare


def activation(weighted, clamp, counters, x):
    """Macro ``activate(raw, at, state, weight, limit, y, counts)``: y[8 at ...] of a row that is not dead.

    ``raw`` holds the gate octet 2 at and the up octet 2 at + 1. The limits apply by comparison, as NaN stays.
    """
    read = source(x, True)

    @T.macro
    def activate(raw, at, state, weight, limit, y, counts):
        gate = T.alloc_local((OCTET,), "float32")
        up = T.alloc_local((OCTET,), "float32")
        if is_read(state, counters):
            read.decode(raw, 2 * at, gate)
            read.decode(raw, 2 * at + 1, up)
            for i in T.unroll(OCTET):
                if counters:
                    counts[0] = counts[0] + T.cast(gate[i] > limit, "int32")
                    counts[1] = counts[1] + T.cast(up[i] > limit, "int32")
                    counts[2] = counts[2] + T.cast(up[i] < -limit, "int32")
                if clamp:
                    gate[i] = T.if_then_else(gate[i] > limit, limit, gate[i])
                    up[i] = T.if_then_else(up[i] > limit, limit, T.if_then_else(up[i] < -limit, -limit, up[i]))
                y[at * OCTET + i] = gate[i] / (T.float32(1.0) + T.exp(-gate[i])) * up[i]
                if weighted:
                    y[at * OCTET + i] = y[at * OCTET + i] * weight
            if counters == 4:
                counts[3] = counts[3] + OCTET
        if state == ZERO:
            for i in T.unroll(OCTET):
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


def by_group(x, fmt, npc, layout, round_sf, weights, padding, clamp, counters, rows, aligned):
    """One scale for ``npc`` = 32, 64 or 128 columns; 0 writes bfloat16 or float32. A warp takes ``rows`` rows."""
    prepare = row_reader(weights, padding)
    activate = activation(weights is not None, clamp, counters, x)
    report = count_reporter(counters, WARPS)
    read, values_of = source(x, aligned), source("float32", True).decode
    write = octet_writer(fmt, aligned)
    scales = group_scales(fmt, npc, layout, round_sf, rows) if npc else None
    out_dtype, out_bytes = stored_as(fmt)
    column_major = layout in (COLUMN, PACKED, E4M3_COLUMN)
    count = HALVES * rows
    n, width, blocks = T.dynamic("rows"), T.dynamic("width"), T.dynamic("blocks")
    stride, num_experts = T.dynamic("stride", "int64"), T.dynamic("num_experts")

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
        with T.Kernel(*grid(width // (2 * OCTET), padded, rows), threads=32 * WARPS) as (bx, by, bz):
            T.assume(width % (2 * OCTET) == 0)
            thread = T.get_thread_binding()
            octets = width // (2 * OCTET)
            row = first_row(by, bz, thread, rows)
            octet = first_octet(bx, thread)
            given = Rows(positions, row_weights, experts, psum, factor, alignment)
            state = T.alloc_local((rows,), "int32")
            weight = T.alloc_local((rows,), "float32")
            raw = T.alloc_local((2 * count * OCTET,), x)
            y = T.alloc_local((count * OCTET,), "float32")
            amax = T.alloc_local((count,), "float32")
            inverse = T.alloc_local((count,), "float32")
            eight = T.alloc_local((OCTET,), "float32")
            counts = T.alloc_local((4,), "int32")
            for c in T.unroll(4):
                counts[c] = 0
            for r in T.unroll(rows):
                prepare(given, row + r, n, thread % 32, state, weight, r)
            for r in T.unroll(rows):
                for h in T.unroll(HALVES):
                    if is_read(state[r], counters) and row + r < n and octet + h * 32 < octets:
                        read.load(values, row + r, octet + h * 32, raw, 2 * (h * rows + r))
                        read.load(values, row + r, octets + octet + h * 32, raw, 2 * (h * rows + r) + 1)
            for r in T.unroll(rows):
                for h in T.unroll(HALVES):
                    amax[h * rows + r] = T.float32(0.0)
                    for i in T.unroll(OCTET):
                        y[(h * rows + r) * OCTET + i] = T.float32(0.0)
                    if state[r] != DEAD and octet + h * 32 < octets:
                        activate(raw, h * rows + r, state[r], weight[r], limit, y, counts)
                        for i in T.unroll(OCTET):
                            amax[h * rows + r] = fmax(amax[h * rows + r], T.abs(y[(h * rows + r) * OCTET + i]))
            if npc:
                scales(amax, inverse, sf, stride, row, octet, octets, n, state, floor)
            for r in T.unroll(rows):
                for h in T.unroll(HALVES):
                    if row + r < n and octet + h * 32 < octets:
                        values_of(y, h * rows + r, eight)
                        write(data, row + r, octet + h * 32, eight, inverse[h * rows + r] if npc else T.float32(1.0))
            if counters:
                report(counts, totals, thread)

    return swiglu


def by_row(x, fmt, round_sf, weights, padding, clamp, counters, warps, held, aligned):
    """One scale for each row, row-major; ``warps`` warps hold a row in registers, ``held`` octets in a lane."""
    prepare = row_reader(weights, padding)
    activate = activation(weights is not None, clamp, counters, x)
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
            prepare(given, row, n, thread % 32, state, weight, 0)
            for k in T.unroll(held):
                if is_read(state[0], counters) and row < n and octet + k * lanes < octets:
                    read.load(values, row, octet + k * lanes, raw, 2 * k)
                    read.load(values, row, octets + octet + k * lanes, raw, 2 * k + 1)
            for k in T.unroll(held):
                for i in T.unroll(OCTET):
                    y[k * OCTET + i] = T.float32(0.0)
                if state[0] != DEAD and octet + k * lanes < octets:
                    activate(raw, k, state[0], weight[0], limit, y, counts)
                    for i in T.unroll(OCTET):
                        amax[0] = fmax(amax[0], T.abs(y[k * OCTET + i]))
            max_of_row(amax, thread, warps)
            rule(amax[0], floor, scale, inverse)
            if octet == 0 and row < n:
                sf[row, 0] = T.if_then_else(state[0] == DEAD, T.float32(0.0), scale[0])
            for k in T.unroll(held):
                if row < n and octet + k * lanes < octets:
                    values_of(y, k, eight)
                    write(data, row, octet + k * lanes, eight, inverse[0])
            if counters:
                report(counts, totals, thread)

    return swiglu
