"""Gradients of SwiGLU of [N, 2 H], plain and quantised. A block takes one row, and sums over it for its weight."""

import tilelang.language as T

from tk_serving.quant.formats import FORMATS
from tk_serving.quant.kernels.formats import OCTET, fmax, octet_writer
from tk_serving.quant.kernels.sources import block_factor, source
from tk_serving.quant.kernels.sums import octet_sum, sum_of_row
from tk_serving.quant.kernels.swiglu import (
    DEAD,
    LARGEST_GATE,
    LIVE,
    Rows,
    divide,
    limited,
    reciprocal,
    row_reader,
    weights_tensor,
)
from tk_serving.quant.kernels.tiles import HALVES, OCTETS, group_scales
from tk_serving.quant.scales import ROW

THREADS = 256  # of the gather
RESIDENT = 24  # warps on an SM, for which the compiler would take too many registers


def gradient(clamp):
    """Macro ``gradient(a, b, go, weight, limit, act)``: a and b become their gradients, act the activation."""

    @T.macro
    def finish(a, b, go, gate, up, over, s, weight, limit, act, i):
        """``over`` = gate / t and ``s`` = 1 / t with t = 1 + exp(-gate)."""
        q = T.alloc_local((1,), "float32")
        slope = T.alloc_local((1,), "float32")
        act[i] = over * up
        q[0] = go[i] * weight * s
        slope[0] = T.ieee_fmaf(gate, T.float32(1.0) - s, T.float32(1.0))
        if clamp:
            b[i] = T.if_then_else(T.abs(b[i]) > limit, T.float32(0.0), q[0] * gate)
            a[i] = T.if_then_else(a[i] > limit, T.float32(0.0), q[0] * up * slope[0])
        else:
            b[i] = q[0] * gate
            a[i] = q[0] * up * slope[0]

    @T.macro
    def differentiate(a, b, go, weight, limit, act):
        gate = T.alloc_local((OCTET,), "float32")
        up = T.alloc_local((OCTET,), "float32")
        largest = T.alloc_local((1,), "float32")
        t = T.alloc_local((1,), "float32")
        r = T.alloc_local((1,), "float32")
        over = T.alloc_local((1,), "float32")
        s = T.alloc_local((1,), "float32")
        largest[0] = T.float32(0.0)
        for i in T.unroll(OCTET):
            gate[i] = a[i]
            up[i] = b[i]
            if clamp:
                gate[i] = T.if_then_else(a[i] > limit, limit, a[i])
                up[i] = limited(b[i], limit)
            largest[0] = fmax(largest[0], T.abs(gate[i]))
        if largest[0] <= T.float32(LARGEST_GATE):
            for i in T.unroll(OCTET):
                t[0] = T.float32(1.0) + T.exp(-gate[i])
                reciprocal(t[0], True, r)
                divide(gate[i], t[0], r[0], over)
                divide(T.float32(1.0), t[0], r[0], s)
                finish(a, b, go, gate[i], up[i], over[0], s[0], weight, limit, act, i)
        else:
            for i in T.unroll(OCTET):
                t[0] = T.float32(1.0) + T.exp(-gate[i])
                over[0] = gate[i] / t[0]
                s[0] = T.float32(1.0) / t[0]
                finish(a, b, go, gate[i], up[i], over[0], s[0], weight, limit, act, i)

    return differentiate


def build(x, npc, cast, grad, weights, padding, clamp, out, x_grad, weight_grad, round_sf, warps, aligned):
    """Gradients of rows; those without a token or an expert are zeros.

    Args:
        x: source name; codes have scales for groups of ``npc`` columns.
        cast: whether the gradient is quantised with groups of ``npc`` columns.
        grad: dtype of the incoming gradient.
        out, x_grad: dtype of the activation and of the plain gradient; None for none.
        weight_grad: whether the gradient of the weight of every row is stored.
    """
    read, read_grad, values_of = source(x, aligned), source(grad, aligned), source("float32", True).decode
    load_factor = block_factor("float32" if x == "e4m3" else None, 1, npc)
    prepare, weigh = row_reader(weights, padding)
    differentiate = gradient(clamp)
    write_out, write_grad = octet_writer(out or grad, aligned), octet_writer(x_grad or grad, aligned)
    write_data = octet_writer("e4m3", aligned)
    scales = group_scales("e4m3", npc, ROW, round_sf) if cast else None
    floor = FORMATS["e4m3"].floor
    n, width, hidden, blocks, x_blocks = (T.dynamic(name) for name in ("rows", "width", "hidden", "blocks", "x_blocks"))
    x_stride, x_sf_0, x_sf_1 = (T.dynamic(name, "int64") for name in ("x_stride", "x_sf_0", "x_sf_1"))
    num_experts = T.dynamic("num_experts")

    @T.prim_func
    def swiglu_backward(
        values: T.StridedTensor((n, width), (x_stride, 1), read.dtype),
        values_sf: T.StridedTensor((n, x_blocks), (x_sf_0, x_sf_1), "float32"),
        out_grad: T.Tensor((n, hidden), grad),
        positions: T.Tensor((n,), "int32"),
        row_weights: weights_tensor(weights, n),
        psum: T.Tensor((num_experts,), "int32"),
        activation: T.Tensor((n, hidden), out or grad),
        gradients: T.Tensor((n, width), x_grad or grad),
        data: T.Tensor((n, width), "float8_e4m3fn"),
        sf: T.Tensor((n, blocks), "float32"),
        weight_grads: T.Tensor((n,), "float32"),
        limit: T.float32,
        factor: T.float32,
        alignment: T.int32,
    ):
        with T.Kernel(n, threads=32 * warps) as row:
            T.annotate_min_blocks_per_sm(max(1, RESIDENT // warps))
            T.assume(width % (2 * OCTET) == 0)
            thread = T.get_thread_binding()
            octets = width // (2 * OCTET)
            octet = thread // 32 * OCTETS + thread % 32
            given = Rows(positions, row_weights, None, psum, factor, alignment)
            state = T.alloc_local((1,), "int32")
            place = T.alloc_local((1,), "int32")
            weight = T.alloc_local((1,), "float32")
            raw = T.alloc_local((2 * HALVES * OCTET,), read.dtype)
            raw_grad = T.alloc_local((HALVES * OCTET,), grad)
            scale = T.alloc_local((2 * HALVES,), "float32")
            a = T.alloc_local((OCTET,), "float32")
            b = T.alloc_local((OCTET,), "float32")
            go = T.alloc_local((OCTET,), "float32")
            act = T.alloc_local((OCTET,), "float32")
            kept = T.alloc_local((2 * HALVES * OCTET,), "float32")
            amax = T.alloc_local((HALVES,), "float32")
            amax_up = T.alloc_local((HALVES,), "float32")
            inverse = T.alloc_local((HALVES,), "float32")
            inverse_up = T.alloc_local((HALVES,), "float32")
            shared = T.alloc_shared((warps,), "float32")
            total = T.alloc_local((1,), "float32")
            total[0] = T.float32(0.0)
            prepare(given, row, n, thread % 32, state, place, 0)
            for h in T.unroll(HALVES):
                if state[0] != DEAD and octet + h * 32 < octets:
                    read.load(values, row, octet + h * 32, raw, 2 * h)
                    read.load(values, row, octets + octet + h * 32, raw, 2 * h + 1)
                    load_factor(values_sf, row, octet + h * 32, scale, 2 * h)
                    load_factor(values_sf, row, octets + octet + h * 32, scale, 2 * h + 1)
                    read_grad.load(out_grad, row, octet + h * 32, raw_grad, h)
            weigh(given, row, state, place, weight, 0)
            for h in T.unroll(HALVES):
                amax[h] = T.float32(0.0)
                amax_up[h] = T.float32(0.0)
                for i in T.unroll(OCTET):
                    a[i] = T.float32(0.0)
                    b[i] = T.float32(0.0)
                    act[i] = T.float32(0.0)
                if octet + h * 32 < octets:
                    if state[0] == LIVE:
                        read.decode(raw, 2 * h, a)
                        read.decode(raw, 2 * h + 1, b)
                        read_grad.decode(raw_grad, h, go)
                        for i in T.unroll(OCTET):
                            a[i] = a[i] * scale[2 * h]
                            b[i] = b[i] * scale[2 * h + 1]
                        differentiate(a, b, go, weight[0], limit, act)
                        for i in T.unroll(OCTET):
                            amax[h] = fmax(amax[h], T.abs(a[i]))
                            amax_up[h] = fmax(amax_up[h], T.abs(b[i]))
                            go[i] = go[i] * act[i]
                        total[0] = total[0] + octet_sum(go, 0)
                    if x_grad is not None:
                        write_grad(gradients, row, octet + h * 32, a, T.float32(1.0))
                        write_grad(gradients, row, octets + octet + h * 32, b, T.float32(1.0))
                    if out is not None:
                        for i in T.unroll(OCTET):
                            act[i] = act[i] * weight[0]
                        if state[0] != LIVE:
                            for i in T.unroll(OCTET):
                                act[i] = T.float32(0.0)
                        write_out(activation, row, octet + h * 32, act, T.float32(1.0))
                if cast:
                    for i in T.unroll(OCTET):
                        kept[2 * h * OCTET + i] = a[i]
                        kept[(2 * h + 1) * OCTET + i] = b[i]
            if cast:
                scales(amax, inverse, sf, 0, row, octet, octets, n, state, T.float32(floor))
                scales(amax_up, inverse_up, sf, 0, row, octets + octet, 2 * octets, n, state, T.float32(floor))
                for h in T.unroll(HALVES):
                    if octet + h * 32 < octets:
                        values_of(kept, 2 * h, a)
                        write_data(data, row, octet + h * 32, a, inverse[h])
                        values_of(kept, 2 * h + 1, b)
                        write_data(data, row, octets + octet + h * 32, b, inverse_up[h])
            if weight_grad:
                sum_of_row(total, shared, thread, warps)
                if thread == 0:
                    weight_grads[row] = total[0] * factor if weights == "row" else total[0]

    return swiglu_backward


def gather():
    """weight_grad[t, k] = the sum of the row at token_topk_to_pos[t, k]; 0 where there is none."""
    n, tokens, topk = T.dynamic("rows"), T.dynamic("tokens"), T.dynamic("topk")

    @T.prim_func
    def gather_weight_grad(
        sums: T.Tensor((n,), "float32"),
        token_topk_to_pos: T.Tensor((tokens, topk), "int32"),
        weight_grad: T.Tensor((tokens, topk), "float32"),
    ):
        with T.Kernel(T.ceildiv(tokens * topk, THREADS), threads=THREADS) as block:
            at = block * THREADS + T.get_thread_binding()
            place = T.alloc_local((1,), "int32")
            total = T.alloc_local((1,), "float32")
            if at < tokens * topk:
                place[0] = token_topk_to_pos[at // topk, at % topk]
                total[0] = T.float32(0.0)
                if place[0] >= 0 and place[0] < n:
                    total[0] = sums[place[0]]
                weight_grad[at // topk, at % topk] = total[0]

    return gather_weight_grad
