"""Products of the residual streams with the mixing matrix, and their square sums, split over the hidden dimension.

A block owns a slice of H (of all four streams) and passes over tiles of 16 tokens; a warp owns 32 columns of the slice.
The words of the next tiles travel to shared memory meanwhile, each to a place that its own thread reads.

The matrix is rounded to TF32. Such a value is the sum of two bfloat16 values, so its product with the streams runs on
the tensor cores as two products in bfloat16, as exact as one in TF32: the words of the streams *are* the fragments of a
lane, without conversion, in an order of columns that is chosen to fit. A lane's part of the matrix stays in registers.
The square sums are the diagonal of the product of a tile with itself.

Every sum has an order that depends on H and the number of splits alone: a row has the same bits in any batch.

The pass over the streams can do more on its way: first update them after a sublayer (the words are the same), and write
the input of the next one where its pre mixes are known before.
"""

import tilelang.language as T

from tk_serving.mhc.kernels.words import VALUES, pack, unpack
from tk_serving.moe.kernels.warp import ballot

MULT = 4
UNIT = 32  # columns of a warp: four lanes with a word of eight values each


def tf32(x):
    """float32 rounded to TF32, half up in magnitude; inf and NaN unchanged."""
    bits = T.reinterpret(x, "int32")
    rounded = (bits + T.int32(0x1000)) & T.int32(-0x2000)
    return T.reinterpret(T.if_then_else(infinite(bits), bits, rounded), "float32")


def infinite(bits):
    """Whether a float32 is infinity or NaN."""
    return (bits & T.int32(0x7F800000)) == T.int32(0x7F800000)


def lower_part(bits):
    """Bits of the difference of a float32 to its upper half, which is a bfloat16; zero where that is not finite."""
    difference = T.reinterpret(bits, "float32") - T.reinterpret(bits & T.int32(-65536), "float32")
    return T.if_then_else(infinite(bits), 0, T.reinterpret(difference, "int32"))


def two_halves(low, high):
    """The upper halves of two words in one."""
    return ((low >> 16) & T.int32(0xFFFF)) | (high & T.int32(-65536))


def mma(a, a_at, b, b_at, c, c_at):
    """c += a b for fragments of 16 x 16 and 16 x 8 bfloat16 values."""
    return T.ptx_mma(
        "float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32", a.data, a_at, b.data, b_at, c.data, c_at,
        T.bool(False),
    )  # fmt: skip


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
    stages: int = 3,
    tall: int = 1,
    resident: int = 0,
):
    """
    Args:
        fold: multiply the matrix with a norm weight.
        update: the streams are those after a sublayer, and written.
        next_input: NONE, FIRST or MIXED.
        stages: tiles in shared memory, all but one of them on their way.
        tall: times 16 tokens of a tile.
        resident: blocks of a multiprocessor; 0 for as many as the registers allow.
    """
    words = hidden // VALUES
    units = hidden // UNIT
    warps = -(-units // splits)
    threads = 32 * warps
    resident = resident or (2 if threads <= 128 else 1)
    groups = max(1, 132 * resident // splits)
    tiles = -(-mixes // 8)
    rows = 2 * tall  # of a lane
    tile_rows = 16 * tall  # the rows of the tensor-core operation
    inputs = MULT + update
    # Groups of four coefficients that a token needs: post, four of the combination, pre.
    quads = (1 + MULT if update else 0) + (1 if next_input == MIXED else 0)
    turns = -(-tile_rows * quads // threads)
    tokens = T.dynamic("tokens", "int64")

    def given(present):
        return tokens if present else 1

    @T.macro
    def load_matrix(fn, weight, matrix, unit, lane):
        """The lane's fragments: entry (stream, half, tile) has four columns of a row of fn, upper and lower parts."""
        loaded = T.alloc_local((MULT * 2 * tiles * 4,), "float32")
        factor = T.alloc_local((4,), "float32")
        bits = T.alloc_local((4,), "int32")
        rest = T.alloc_local((4,), "int32")
        voted = T.alloc_local((1,), "uint32")
        for stream in T.unroll(MULT):
            for half in T.unroll(2):
                for tile in T.unroll(tiles):
                    row = tile * 8 + lane // 4
                    at = ((stream * 2 + half) * tiles + tile) * 4
                    for v in T.vectorized(4):
                        loaded[at + v] = 0.0
                    if unit < units and row < mixes:
                        for v in T.vectorized(4):
                            loaded[at + v] = fn[row, stream * hidden + unit * UNIT + lane % 4 * VALUES + half * 4 + v]
        for stream in T.unroll(MULT):
            for half in T.unroll(2):
                if fold:
                    for v in T.vectorized(4):
                        factor[v] = 0.0
                    if unit < units:
                        for v in T.vectorized(4):
                            factor[v] = weight[stream * hidden + unit * UNIT + lane % 4 * VALUES + half * 4 + v]
                for tile in T.unroll(tiles):
                    at = ((stream * 2 + half) * tiles + tile) * 4
                    for v in T.unroll(4):
                        if fold:
                            loaded[at + v] = loaded[at + v] * factor[v]
                        bits[v] = T.reinterpret(tf32(loaded[at + v]), "int32")
                        rest[v] = lower_part(bits[v])
                    for pair in T.unroll(2):
                        matrix[at + pair] = two_halves(bits[2 * pair], bits[2 * pair + 1])
                        matrix[at + 2 + pair] = two_halves(rest[2 * pair], rest[2 * pair + 1])
        # The compiler would move all this into the loop over the tokens, to do it again for each tile. It cannot move
        # it past a vote.
        bits[0] = 0
        for i in T.unroll(MULT * 2 * tiles * 4):
            bits[0] = bits[0] | matrix[i]
        voted[0] = ballot(bits[0] != 0)

    @T.macro
    def multiply(ints, at, stream, group, matrix, total, squares):
        """total += x fn^T and squares += x^2 for one stream x of two rows of the lane, whose words start at ``at``."""
        left = T.alloc_local((4,), "int32")
        products = T.alloc_local((8,), "float32")  # of the rows with one another: the diagonals are the squares
        for i in T.unroll(8):
            products[i] = 0.0
        for half in T.unroll(2):
            for row in T.unroll(2):
                left[row] = ints[at + row * 4 + half * 2]
                left[2 + row] = ints[at + row * 4 + half * 2 + 1]
            for part in T.unroll(2):
                for tile in T.unroll(tiles):
                    mma(
                        left, 0, matrix, ((stream * 2 + half) * tiles + tile) * 4 + 2 * part,
                        total, (group * tiles + tile) * 4,
                    )  # fmt: skip
            for row in T.unroll(2):
                mma(left, 0, ints, at + row * 4 + half * 2, products, 4 * row)
        for row in T.unroll(2):
            for v in T.unroll(2):
                mine = (group * 2 + row) * 2 + v
                squares[mine] = squares[mine] + products[6 * row + v]

    @T.macro
    def write_sums(total, squares, shared, thread):
        lane = thread % 32
        for row in T.unroll(rows):
            for tile in T.unroll(tiles):
                for v in T.unroll(2):
                    if tile * 8 + lane % 4 * 2 + v < mixes:
                        shared[thread // 32, row * 8 + lane // 4, tile * 8 + lane % 4 * 2 + v] = total[
                            4 * (row // 2 * tiles + tile) + 2 * (row % 2) + v
                        ]
            if lane % 4 == lane // 8:  # where the diagonal lies
                shared[thread // 32, row * 8 + lane // 4, mixes] = T.if_then_else(
                    lane // 4 % 2 == 0, squares[2 * row], squares[2 * row + 1]
                )

    @T.macro
    def store_sums(shared, mul, sqr, split, first, tokens, thread):
        """Sum over the warps in ascending order, and write the tile's part of the results."""
        value = T.alloc_local((warps,), "float32")
        at = T.alloc_local((2,), "int32")
        for step in T.unroll(-(-tile_rows * (mixes + 1) // threads)):
            at[0] = (step * threads + thread) // (mixes + 1)
            at[1] = (step * threads + thread) % (mixes + 1)
            if at[0] < tile_rows and first + at[0] < tokens:
                for w in T.unroll(warps):
                    value[w] = shared[w, at[0], at[1]]
                for w in T.unroll(1, warps):
                    value[0] = value[0] + value[w]
                if at[1] < mixes:
                    mul[split, first + at[0], at[1]] = value[0]
                else:
                    sqr[split, first + at[0]] = value[0]

    @T.macro
    def stage(staged, post_mix, comb_mix, pre_mix, first, tokens, thread):
        """Fetch coefficients of a tile; a thread has ``staged[4 i ... 4 i + 3]``."""
        for i in T.unroll(turns):
            entry = i * threads + thread
            token = T.min(first + entry // quads, tokens - 1)
            quad = entry % quads
            if entry < tile_rows * quads:
                if next_input == MIXED and quad == quads - 1:
                    for v in T.vectorized(4):
                        staged[4 * i + v] = pre_mix[token, v]
                elif quad == 0:
                    for v in T.vectorized(4):
                        staged[4 * i + v] = post_mix[token, v]
                else:
                    for v in T.vectorized(4):
                        staged[4 * i + v] = comb_mix[token, 4 * (quad - 1) + v]

    @T.macro
    def unstage(staged, coefficients, turn, thread):
        for i in T.unroll(turns):
            if i * threads + thread < tile_rows * quads:
                for v in T.vectorized(4):
                    coefficients[turn, (i * threads + thread) * 4 + v] = staged[4 * i + v]

    @T.macro
    def fetch(x, residual, ring, slot, first, tokens, word, lane, thread):
        """Start the copy of the lane's words of a tile; rows past the end repeat the last one, and are not written."""
        for row in T.unroll(rows):
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

    @T.macro
    def update_streams(streams, at, sublayer, coefficients, turn, row):
        """The lane's words of one row after the sublayer, in place: stream i at word ``at + 2 i``."""
        ints = T.Tensor((2 * MULT * 4,), "int32", data=streams.data, scope="local")
        halves = T.Tensor((2 * MULT * VALUES,), "bfloat16", data=streams.data, scope="local")
        output_ints = T.Tensor((4,), "int32", data=sublayer.data, scope="local")
        value = T.alloc_local((2 * MULT,), "float32")
        x = T.alloc_local((2,), "float32")
        total = T.alloc_local((2,), "float32")
        factor = T.alloc_local((4 + MULT * 4,), "float32")
        for i in T.vectorized(4 + MULT * 4):
            factor[i] = coefficients[turn, row * 4 * quads + i]
        for w in T.unroll(4):
            x[0] = T.reinterpret(output_ints[w] << 16, "float32")
            x[1] = T.reinterpret(output_ints[w] & T.int32(-65536), "float32")
            for i in T.unroll(MULT):
                value[2 * i] = T.reinterpret(ints[(at + 2 * i) * 4 + w] << 16, "float32")
                value[2 * i + 1] = T.reinterpret(ints[(at + 2 * i) * 4 + w] & T.int32(-65536), "float32")
            for o in T.unroll(MULT):
                for v in T.unroll(2):
                    total[v] = factor[o] * x[v]
                    for i in T.unroll(MULT):
                        total[v] = T.ieee_fmaf(factor[4 + MULT * i + o], value[2 * i + v], total[v])
                for v in T.vectorized(2):
                    halves[(at + 2 * o) * VALUES + 2 * w + v] = T.cast(total[v], "bfloat16")

    @T.macro
    def write_input(streams, at, coefficients, turn, row, input_words, token, word):
        """The lane's word of the next sublayer's input."""
        ints = T.Tensor((2 * MULT * 4,), "int32", data=streams.data, scope="local")
        value = T.alloc_local((VALUES,), "float32")
        total = T.alloc_local((VALUES,), "float32")
        factor = T.alloc_local((MULT,), "float32")
        result = T.alloc_local((1,), "int32x4")
        halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
        if next_input == FIRST:
            result[0] = streams[at]
        else:
            for i in T.vectorized(MULT):
                factor[i] = coefficients[turn, ((row + 1) * quads - 1) * 4 + i]
            for j in T.unroll(VALUES):
                total[j] = 0.0
            for i in T.unroll(MULT):
                unpack(ints, (at + 2 * i) * 4, value, 0)
                for j in T.unroll(VALUES):
                    total[j] = T.ieee_fmaf(factor[i], value[j], total[j])
            pack(total, 0, halves, 0)
        input_words[token, word] = result[0]

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
        with T.Kernel(splits, T.min(T.ceildiv(tokens, tile_rows), groups), threads=threads) as (split, group):
            T.annotate_min_blocks_per_sm(resident)
            thread = T.get_thread_binding()
            lane = thread % 32
            unit = split * warps + thread // 32
            word = unit * (UNIT // VALUES) + lane % 4
            start = T.cast(group, "int64") * tile_rows
            updated_words = T.Tensor((given(update), MULT, words), "int32x4", data=updated.data)
            input_words = T.Tensor((given(next_input != NONE), words), "int32x4", data=layer_input.data)
            ring = T.alloc_shared((stages, rows * inputs, threads, VALUES), "bfloat16")
            ring_words = T.Tensor((stages, rows * inputs, threads), "int32x4", data=ring.data, scope="shared.dyn")
            shared = T.alloc_shared((warps, tile_rows, mixes + 1), "float32")
            coefficients = T.alloc_shared((2, max(tile_rows * quads * 4, 4)), "float32")
            matrix = T.alloc_local((MULT * 2 * tiles * 4,), "int32")
            staged = T.alloc_local((max(turns * 4, 4),), "float32")
            streams = T.alloc_local((2 * MULT,), "int32x4")
            ints = T.Tensor((2 * MULT * 4,), "int32", data=streams.data, scope="local")
            sublayer = T.alloc_local((1,), "int32x4")
            total = T.alloc_local((4 * tiles * tall,), "float32")
            squares = T.alloc_local((2 * rows,), "float32")
            for ahead in T.unroll(stages - 1):
                if unit < units and start + ahead * (tile_rows * groups) < tokens:
                    fetch(x, residual, ring, ahead, start + ahead * (tile_rows * groups), tokens, word, lane, thread)
                T.ptx_commit_group()
            if quads > 0:
                stage(staged, post_mix, comb_mix, pre_mix, start, tokens, thread)
            load_matrix(fn, weight, matrix, unit, lane)
            if quads > 0:
                unstage(staged, coefficients, 0, thread)
                T.sync_threads()
            slot = T.alloc_local((2,), "int32")  # that is read, and that is filled
            slot[0] = 0
            slot[1] = stages - 1
            for step in T.serial(T.cast(T.ceildiv(tokens - start, tile_rows * groups), "int32")):
                first = start + T.cast(step, "int64") * (tile_rows * groups)
                far = first + (stages - 1) * (tile_rows * groups)
                turn = step % 2
                for i in T.unroll(4 * tiles * tall):
                    total[i] = 0.0
                for i in T.unroll(2 * rows):
                    squares[i] = 0.0
                T.ptx_wait_group(stages - 2)
                T.sync_threads()
                if unit < units and far < tokens:
                    fetch(x, residual, ring, slot[1], far, tokens, word, lane, thread)
                T.ptx_commit_group()
                if quads > 0 and first + tile_rows * groups < tokens:
                    stage(staged, post_mix, comb_mix, pre_mix, first + tile_rows * groups, tokens, thread)
                if unit < units:
                    for half in T.unroll(tall):
                        for row in T.unroll(2):
                            own = (half * 2 + row) * 8 + lane // 4  # row of the tile
                            for stream in T.unroll(MULT):
                                streams[stream * 2 + row] = ring_words[
                                    slot[0], (half * 2 + row) * inputs + stream, thread
                                ]
                            if update:
                                sublayer[0] = ring_words[slot[0], (half * 2 + row) * inputs + MULT, thread]
                                update_streams(streams, row, sublayer, coefficients, turn, own)
                                if first + own < tokens:
                                    for stream in T.unroll(MULT):
                                        updated_words[first + own, stream, word] = streams[stream * 2 + row]
                            if next_input != NONE and first + own < tokens:
                                write_input(streams, row, coefficients, turn, own, input_words, first + own, word)
                        for stream in T.unroll(MULT):
                            multiply(ints, stream * 8, stream, half, matrix, total, squares)
                write_sums(total, squares, shared, thread)
                if quads > 0:
                    unstage(staged, coefficients, 1 - turn, thread)
                T.sync_threads()
                store_sums(shared, mul, sqr, split, first, tokens, thread)
                for i in T.unroll(2):
                    slot[i] = T.if_then_else(slot[i] == stages - 1, 0, slot[i] + 1)

    return norm_fn
