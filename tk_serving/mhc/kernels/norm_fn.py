"""Products of the residual streams with the mixing matrix, and their square sums, split over the hidden dimension.

A block owns a slice of H (of all four streams) and passes over tiles of 16 tokens; a warp owns 32 columns of the slice.
The matrix products run on the tensor cores in TF32: bfloat16 is exact in it, the matrix is rounded to it. A lane copies
16 bytes of two rows, and these words *are* its fragments: the columns of a dot product may be taken in any order, so
the order is chosen to fit. A lane's part of the matrix stays in registers; the words of the next tiles travel to shared
memory meanwhile, each to a place that its own thread reads.

With few tokens the matrix is what takes time. It is then divided further: a block takes eight of the mixes.

Every sum has an order that depends on H and the number of splits alone: a row has the same bits in any batch.

The pass over the streams can do more on its way: first update them after a sublayer (the words are the same), and write
the input of the next one where its pre mixes are known before.
"""

import tilelang.language as T

from tk_serving.mhc.kernels.words import VALUES, pack
from tk_serving.moe.kernels.warp import ballot

MULT = 4
ROWS = 16  # tokens of a tile, the rows of the tensor-core operation
UNIT = 32  # columns of a warp: four lanes with a word of eight values each
FEW, FEW_UPDATED = 64, 16  # tokens up to which a block takes eight mixes: each of them repeats the update
DEPTH = 3  # tiles in shared memory
SHARED_MEMORY = 226 * 1024
# The matrix takes 96 registers of a thread. Blocks of more than 256 threads leave too few for the rest of an update.
LOCAL_MEMORY = {"build": "blocks of more than 256 threads lack registers for the update"}
MULTIPROCESSORS = 132


def tf32(x):
    """float32 rounded to TF32, half up in magnitude; inf and NaN unchanged."""
    bits = T.reinterpret(x, "int32")
    rounded = (bits + T.int32(0x1000)) & T.int32(-0x2000)
    return T.reinterpret(T.if_then_else((bits & T.int32(0x7F800000)) == T.int32(0x7F800000), bits, rounded), "float32")


def copy_word(shared, source):
    """Start the copy of 16 bytes to shared memory."""
    return T.evaluate(T.call_extern("handle", "tl::cp_async_gs<16>", shared, source))


NONE, FIRST, MIXED = "none", "first", "mixed"
"""What the pass writes as the next input: nothing, the first stream, or the streams weighted by given pre mixes."""


def build(
    hidden: int,
    mixes: int,
    splits: int,
    fold: bool,
    update: bool,
    next_input: str,
):
    """
    Args:
        fold: multiply the matrix with a norm weight.
        update: the streams are those after a sublayer, and written.
        next_input: NONE, FIRST or MIXED.
    """
    words = hidden // VALUES
    units = hidden // UNIT
    warps = -(-units // splits)
    threads = 32 * warps
    tiles = -(-mixes // 8)
    resident = 2 if threads <= 256 and tiles == 1 and not update else 1  # blocks of a multiprocessor
    groups = max(1, MULTIPROCESSORS * resident // splits)
    few = FEW_UPDATED if update else FEW
    few_groups = max(1, groups // tiles)
    inputs = MULT + update
    together = update or next_input != NONE  # a tile's streams are needed at once
    # Groups of four coefficients that a token needs: post, four of the combination, pre.
    quads = (1 + MULT if update else 0) + (1 if next_input == MIXED else 0)
    turns = -(-ROWS * quads // threads)
    sum_words = warps * ROWS * (mixes + 1)
    stage_bytes = 2 * inputs * threads * 16 + ROWS * quads * 16
    stages = max(2, min(DEPTH, (SHARED_MEMORY // resident - 8 * sum_words - 1024) // stage_bytes))
    tokens = T.dynamic("tokens", "int64")

    def given(present):
        return tokens if present else 1

    @T.macro
    def load_matrix(fn, matrix, first_tile, number, unit, lane):
        """The lane's fragments: entry (stream, tile, half) holds four neighbouring columns of one row of fn."""
        for entry in T.unroll(MULT * number * 2):
            row = (first_tile + entry // 2 % number) * 8 + lane // 4
            column = entry // (2 * number) * hidden + unit * UNIT + lane % 4 * VALUES + entry % 2 * 4
            for v in T.vectorized(4):
                matrix[4 * entry + v] = 0.0
            if unit < units and row < mixes:
                for v in T.vectorized(4):
                    matrix[4 * entry + v] = fn[row, column + v]

    @T.macro
    def round_matrix(weight, matrix, number, unit, lane):
        """What load_matrix brought, times the norm weight, in TF32."""
        factor = T.alloc_local((4,), "float32")
        for entry in T.unroll(MULT * number * 2):
            if fold:
                column = entry // (2 * number) * hidden + unit * UNIT + lane % 4 * VALUES + entry % 2 * 4
                for v in T.vectorized(4):
                    factor[v] = 0.0
                if unit < units:
                    for v in T.vectorized(4):
                        factor[v] = weight[column + v]
                for v in T.unroll(4):
                    matrix[4 * entry + v] = matrix[4 * entry + v] * factor[v]
            for v in T.unroll(4):
                matrix[4 * entry + v] = tf32(matrix[4 * entry + v])
        # The compiler would round again for each tile. It cannot move this past a vote.
        bits = T.alloc_local((1,), "int32")
        voted = T.alloc_local((1,), "uint32")
        bits[0] = 0
        for i in T.unroll(MULT * number * 8):
            bits[0] = bits[0] | T.reinterpret(matrix[i], "int32")
        voted[0] = ballot(bits[0] != 0)

    @T.macro
    def multiply(ints, stream, number, matrix, total, squares):
        """total += x fn^T and squares += x^2 for one stream x of the lane's two rows."""
        left = T.alloc_local((4,), "float32")
        for half in T.unroll(2):
            for pair in T.unroll(2):
                for row in T.unroll(2):
                    word = ints[(row * MULT + stream) * 4 + half * 2 + pair]
                    left[row] = T.reinterpret(word << 16, "float32")
                    left[2 + row] = T.reinterpret(word & T.int32(-65536), "float32")
                    squares[row] = T.ieee_fmaf(left[row], left[row], squares[row])
                    squares[row] = T.ieee_fmaf(left[2 + row], left[2 + row], squares[row])
                for tile in T.unroll(number):
                    T.ptx_mma(
                        "float32", "m16n8k8", "row", "col", "tf32", "tf32", "fp32", left.data, 0,
                        matrix.data, ((stream * number + tile) * 2 + half) * 4 + 2 * pair, total.data, 4 * tile,
                        T.bool(False),
                    )  # fmt: skip

    @T.macro
    def hand_over(total, squares, number, shared, turn, thread):
        """The warp's part of a tile's sums, for store_sums."""
        lane = thread % 32
        for row in T.unroll(2):
            squares[row] = squares[row] + T.shfl_xor(squares[row], 1)
            squares[row] = squares[row] + T.shfl_xor(squares[row], 2)
        for row in T.unroll(2):
            for tile in T.unroll(number):
                for v in T.unroll(2):
                    if tile * 8 + lane % 4 * 2 + v < mixes:
                        shared[turn, thread // 32, row * 8 + lane // 4, tile * 8 + lane % 4 * 2 + v] = total[
                            4 * tile + 2 * row + v
                        ]
            if lane % 4 == 0:
                shared[turn, thread // 32, row * 8 + lane // 4, mixes] = squares[row]

    @T.macro
    def store_sums(shared, turn, mul, sqr, split, first_tile, number, first, tokens, thread):
        """Sum over the warps in ascending order, and write the tile's part of the results."""
        value = T.alloc_local((warps,), "float32")
        at = T.alloc_local((3,), "int32")
        width = min(8 * number, mixes) + 1
        for step in T.unroll(-(-ROWS * width // threads)):
            at[0] = (step * threads + thread) // width
            at[1] = (step * threads + thread) % width
            at[2] = T.if_then_else(at[1] == width - 1, mixes, at[1])
            if at[0] < ROWS and first + at[0] < tokens:
                for w in T.unroll(warps):
                    value[w] = shared[turn, w, at[0], at[2]]
                for w in T.unroll(1, warps):
                    value[0] = value[0] + value[w]
                if at[1] < width - 1:
                    if first_tile * 8 + at[1] < mixes:
                        mul[split, first + at[0], first_tile * 8 + at[1]] = value[0]
                elif first_tile == 0:
                    sqr[split, first + at[0]] = value[0]

    @T.macro
    def fetch(
        x, residual, post_mix, comb_mix, pre_mix, ring, coefficients, slot, first, tokens, unit, word, lane, thread
    ):
        """Start the copy of a tile; rows past the end repeat the last one, and nothing of them is written."""
        if unit < units:
            for row in T.unroll(2):
                token = T.min(first + row * 8 + lane // 4, tokens - 1)
                for stream in T.unroll(MULT):
                    copy_word(
                        T.address_of(ring[slot, row * inputs + stream, thread, 0]),
                        T.address_of(residual[token, stream, word * VALUES]),
                    )
                if update:
                    copy_word(
                        T.address_of(ring[slot, row * inputs + MULT, thread, 0]), T.address_of(x[token, word * VALUES])
                    )
        for i in T.unroll(turns):
            entry = i * threads + thread
            token = T.min(first + entry // max(quads, 1), tokens - 1)
            quad = entry % max(quads, 1)
            if entry < ROWS * quads:
                if next_input == MIXED and quad == quads - 1:
                    copy_word(T.address_of(coefficients[slot, entry, 0]), T.address_of(pre_mix[token, 0]))
                elif quad == 0:
                    copy_word(T.address_of(coefficients[slot, entry, 0]), T.address_of(post_mix[token, 0]))
                else:
                    copy_word(T.address_of(coefficients[slot, entry, 0]), T.address_of(comb_mix[token, 4 * quad - 4]))

    @T.macro
    def update_streams(ints, halves, output_ints, row, coefficients, slot, lane):
        """The lane's words of one row after the sublayer, in place."""
        value = T.alloc_local((2 * MULT,), "float32")
        x = T.alloc_local((2,), "float32")
        total = T.alloc_local((2,), "float32")
        factor = T.alloc_local((4 + MULT * 4,), "float32")
        for quad in T.unroll(1 + MULT):
            for i in T.vectorized(4):
                factor[4 * quad + i] = coefficients[slot, (row * 8 + lane // 4) * quads + quad, i]
        for w in T.unroll(4):
            x[0] = T.reinterpret(output_ints[4 * row + w] << 16, "float32")
            x[1] = T.reinterpret(output_ints[4 * row + w] & T.int32(-65536), "float32")
            for i in T.unroll(MULT):
                value[2 * i] = T.reinterpret(ints[(row * MULT + i) * 4 + w] << 16, "float32")
                value[2 * i + 1] = T.reinterpret(ints[(row * MULT + i) * 4 + w] & T.int32(-65536), "float32")
            for o in T.unroll(MULT):
                for v in T.unroll(2):
                    total[v] = factor[o] * x[v]
                    for i in T.unroll(MULT):
                        total[v] = T.ieee_fmaf(factor[4 + MULT * i + o], value[2 * i + v], total[v])
                for v in T.vectorized(2):
                    halves[(row * MULT + o) * VALUES + 2 * w + v] = T.cast(total[v], "bfloat16")

    @T.macro
    def write_input(streams, ints, row, coefficients, slot, input_words, token, word, lane):
        """The lane's word of the next sublayer's input."""
        total = T.alloc_local((VALUES,), "float32")
        factor = T.alloc_local((MULT,), "float32")
        result = T.alloc_local((1,), "int32x4")
        halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
        if next_input == FIRST:
            result[0] = streams[row * MULT]
        else:
            for i in T.vectorized(MULT):
                factor[i] = coefficients[slot, (row * 8 + lane // 4 + 1) * quads - 1, i]
            for j in T.unroll(VALUES):
                total[j] = 0.0
            for i in T.unroll(MULT):
                for w in T.unroll(4):
                    word_bits = ints[(row * MULT + i) * 4 + w]
                    total[2 * w] = T.ieee_fmaf(factor[i], T.reinterpret(word_bits << 16, "float32"), total[2 * w])
                    total[2 * w + 1] = T.ieee_fmaf(
                        factor[i], T.reinterpret(word_bits & T.int32(-65536), "float32"), total[2 * w + 1]
                    )
            pack(total, 0, halves, 0)
        input_words[token, word] = result[0]

    @T.macro
    def walk(
        x, residual, post_mix, comb_mix, pre_mix, fn, weight, updated_words, input_words, mul, sqr,
        ring, ring_words, coefficients, shared, tokens, split, group, share, first_tile, number, thread,
    ):  # fmt: skip
        """All tiles of the block, for ``number`` times eight mixes; ``share`` blocks divide the tiles."""
        lane = thread % 32
        unit = split * warps + thread // 32
        word = unit * (UNIT // VALUES) + lane % 4
        start = T.cast(group, "int64") * ROWS
        stride = T.cast(share, "int64") * ROWS
        steps = T.cast(T.ceildiv(tokens - start, stride), "int32")
        matrix = T.alloc_local((MULT * number * 2 * 4,), "float32")
        streams = T.alloc_local((2 * MULT,), "int32x4")
        ints = T.Tensor((2 * MULT * 4,), "int32", data=streams.data, scope="local")
        halves = T.Tensor((2 * MULT * VALUES,), "bfloat16", data=streams.data, scope="local")
        outputs = T.alloc_local((2,), "int32x4")
        output_ints = T.Tensor((8,), "int32", data=outputs.data, scope="local")
        total = T.alloc_local((4 * number,), "float32")
        squares = T.alloc_local((2,), "float32")
        slot = T.alloc_local((2,), "int32")  # that is read, and that is filled
        slot[0] = 0
        slot[1] = stages - 1
        load_matrix(fn, matrix, first_tile, number, unit, lane)
        for ahead in T.unroll(stages - 1):
            if start + ahead * stride < tokens:
                fetch(
                    x, residual, post_mix, comb_mix, pre_mix, ring, coefficients, ahead, start + ahead * stride,
                    tokens, unit, word, lane, thread,
                )  # fmt: skip
            T.ptx_commit_group()
        round_matrix(weight, matrix, number, unit, lane)
        for step in T.serial(steps):
            first = start + T.cast(step, "int64") * stride
            far = first + (stages - 1) * stride
            T.ptx_wait_group(stages - 2)
            T.sync_threads()
            if far < tokens:
                fetch(
                    x, residual, post_mix, comb_mix, pre_mix, ring, coefficients, slot[1], far,
                    tokens, unit, word, lane, thread,
                )  # fmt: skip
            T.ptx_commit_group()
            if step > 0:
                store_sums(shared, (step + 1) % 2, mul, sqr, split, first_tile, number, first - stride, tokens, thread)
            for i in T.unroll(4 * number):
                total[i] = 0.0
            for row in T.unroll(2):
                squares[row] = 0.0
            if unit < units:
                if together:
                    for row in T.unroll(2):
                        token = first + row * 8 + lane // 4
                        for stream in T.unroll(MULT):
                            streams[row * MULT + stream] = ring_words[slot[0], row * inputs + stream, thread]
                        if update:
                            outputs[row] = ring_words[slot[0], row * inputs + MULT, thread]
                            update_streams(ints, halves, output_ints, row, coefficients, slot[0], lane)
                            if token < tokens and first_tile == 0:
                                for stream in T.unroll(MULT):
                                    updated_words[token, stream, word] = streams[row * MULT + stream]
                        if next_input != NONE and token < tokens and first_tile == 0:
                            write_input(streams, ints, row, coefficients, slot[0], input_words, token, word, lane)
                for stream in T.unroll(MULT):
                    if not together:
                        for row in T.unroll(2):
                            streams[row * MULT + stream] = ring_words[slot[0], row * inputs + stream, thread]
                    multiply(ints, stream, number, matrix, total, squares)
            hand_over(total, squares, number, shared, step % 2, thread)
            for i in T.unroll(2):
                slot[i] = T.if_then_else(slot[i] == stages - 1, 0, slot[i] + 1)
        T.sync_threads()
        last = start + T.cast(steps - 1, "int64") * stride
        store_sums(shared, (steps + 1) % 2, mul, sqr, split, first_tile, number, last, tokens, thread)

    @T.prim_func
    def norm_fn(
        x: T.Tensor((given(update), hidden), "bfloat16"),
        residual: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        post_mix: T.Tensor((given(update), MULT), "float32"),
        comb_mix: T.Tensor((given(update), MULT * MULT), "float32"),
        pre_mix: T.Tensor((given(next_input == MIXED), MULT), "float32"),
        fn: T.Tensor((mixes, MULT * hidden), "float32"),
        weight: T.Tensor((MULT * hidden,), "float32"),
        updated: T.Tensor((given(update), MULT, hidden), "bfloat16"),
        layer_input: T.Tensor((given(next_input != NONE), hidden), "bfloat16"),
        mul: T.Tensor((splits, tokens, mixes), "float32"),
        sqr: T.Tensor((splits, tokens), "float32"),
    ):
        with T.Kernel(
            splits,
            T.min(T.ceildiv(tokens, ROWS), T.if_then_else(tokens <= few, few_groups, groups)),
            T.if_then_else(tokens <= few, tiles, 1),
            threads=threads,
        ) as (split, group, part):
            T.annotate_min_blocks_per_sm(resident)
            thread = T.get_thread_binding()
            updated_words = T.Tensor((given(update), MULT, words), "int32x4", data=updated.data)
            input_words = T.Tensor((given(next_input != NONE), words), "int32x4", data=layer_input.data)
            ring = T.alloc_shared((stages, 2 * inputs, threads, VALUES), "bfloat16")
            ring_words = T.Tensor((stages, 2 * inputs, threads), "int32x4", data=ring.data, scope="shared.dyn")
            coefficients = T.alloc_shared((stages, max(ROWS * quads, 1), 4), "float32")
            shared = T.alloc_shared((2, warps, ROWS, mixes + 1), "float32")
            if tiles > 1 and tokens <= few:
                walk(
                    x, residual, post_mix, comb_mix, pre_mix, fn, weight, updated_words, input_words, mul, sqr,
                    ring, ring_words, coefficients, shared, tokens, split, group, few_groups, part, 1, thread,
                )  # fmt: skip
            else:
                walk(
                    x, residual, post_mix, comb_mix, pre_mix, fn, weight, updated_words, input_words, mul, sqr,
                    ring, ring_words, coefficients, shared, tokens, split, group, groups, 0, tiles, thread,
                )  # fmt: skip

    return norm_fn
