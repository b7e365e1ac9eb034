"""Products of the residual streams with the mixing matrix, and their square sums, split over the hidden dimension.

A block owns a slice of H (of all four streams) and passes over token tiles of 16 rows; a warp owns 32 columns of the
slice. The matrix products run on the tensor cores in TF32: bfloat16 is exact in it, the matrix is rounded to it. A lane
reads 16 bytes of two rows, and these words *are* its fragments: the columns of a dot product may be taken in any order,
so the order is chosen to fit. A lane's part of the matrix stays in shared memory, in a place that no other lane reads.

Every sum has an order that depends on H and the number of splits alone: a row has the same bits in any batch.

The pass over the streams can do more on its way: first update them after a sublayer (the words are the same), and write
the input of the next one where its pre mixes are known before.
"""

import tilelang.language as T

from tk_serving.mhc.kernels.words import VALUES, pack, unpack

MULT = 4
ROWS = 16  # tokens of a tile, the rows of the tensor-core operation
UNIT = 32  # columns of a warp: four lanes with a word of eight values each

# Up to 40 bytes of a thread, at the bound of registers that keeps `resident` blocks on an SM: fewer blocks hide less
# of the latency of memory than these few words cost.
LOCAL_MEMORY = {"build": "up to 40 bytes at the register bound that keeps enough blocks on an SM"}


def tf32(x):
    """float32 rounded to TF32, half up in magnitude; inf and NaN unchanged."""
    bits = T.reinterpret(x, "int32")
    rounded = (bits + T.int32(0x1000)) & T.int32(-0x2000)
    return T.reinterpret(T.if_then_else((bits & T.int32(0x7F800000)) == T.int32(0x7F800000), bits, rounded), "float32")


def resident(threads: int) -> int:
    """Blocks of a multiprocessor, by their shared memory (384 bytes of a thread) and registers."""
    return 2 if threads <= 256 else 1


def num_groups(splits: int, threads: int) -> int:
    """Blocks that share a slice of H, so that all blocks together fill a device of 132 multiprocessors once."""
    return max(1, 132 * resident(threads) // splits)


def macros(hidden: int, mixes: int, splits: int, fold: bool, unstage):
    units = hidden // UNIT
    warps = -(-units // splits)
    threads = 32 * warps
    tiles = -(-mixes // 8)
    fragments = MULT * tiles * 2
    at_once = 12 if fragments % 12 == 0 else 8  # loads under way together

    @T.macro
    def load_matrix(fn, weight, matrix, unit, thread):
        """The lane's fragments: entry (stream, tile, half) holds four neighbouring columns of one row of fn."""
        lane = thread % 32
        loaded = T.alloc_local((at_once * 4,), "float32")
        factor = T.alloc_local((4,), "float32")
        for step in T.serial(fragments // at_once):
            for i in T.unroll(at_once):
                entry = step * at_once + i
                row = entry // 2 % tiles * 8 + lane // 4
                column = entry // (2 * tiles) * hidden + unit * UNIT + lane % 4 * VALUES + entry % 2 * 4
                for v in T.vectorized(4):
                    loaded[4 * i + v] = 0.0
                if unit < units and row < mixes:
                    for v in T.vectorized(4):
                        loaded[4 * i + v] = fn[row, column + v]
                    if fold:
                        for v in T.vectorized(4):
                            factor[v] = weight[column + v]
                        for v in T.unroll(4):
                            loaded[4 * i + v] = loaded[4 * i + v] * factor[v]
            for i in T.unroll(at_once):
                for v in T.unroll(4):
                    loaded[4 * i + v] = tf32(loaded[4 * i + v])
                for v in T.vectorized(4):
                    matrix[((step * at_once + i) * threads + thread) * 4 + v] = loaded[4 * i + v]

    @T.macro
    def multiply(ints, stream, matrix, total, squares, thread):
        """total += x fn^T and squares += x^2 for one stream x of the lane's two rows."""
        left = T.alloc_local((4,), "float32")
        right = T.alloc_local((tiles * 4,), "float32")
        for half in T.unroll(2):
            for tile in T.unroll(tiles):
                for v in T.vectorized(4):
                    entry = (stream * tiles + tile) * 2 + half
                    right[4 * tile + v] = matrix[(entry * threads + thread) * 4 + v]
            for pair in T.unroll(2):
                for row in T.unroll(2):
                    word = ints[(row * MULT + stream) * 4 + half * 2 + pair]
                    left[row] = T.reinterpret(word << 16, "float32")
                    left[2 + row] = T.reinterpret(word & T.int32(-65536), "float32")
                    squares[row] = T.ieee_fmaf(left[row], left[row], squares[row])
                    squares[row] = T.ieee_fmaf(left[2 + row], left[2 + row], squares[row])
                for tile in T.unroll(tiles):
                    T.ptx_mma(
                        "float32", "m16n8k8", "row", "col", "tf32", "tf32", "fp32",
                        left.data, 0, right.data, 4 * tile + 2 * pair, total.data, 4 * tile, T.bool(False),
                    )  # fmt: skip

    @T.macro
    def store_sums(total, squares, shared, staged, coefficients, mul, sqr, split, first, tokens, thread):
        """Sum over the warps in ascending order, and write the tile's part of the results.

        Between the barriers no thread reads the coefficients: those of the next tile take their place.
        """
        lane = thread % 32
        value = T.alloc_local((1,), "float32")
        at = T.alloc_local((2,), "int32")
        for row in T.unroll(2):
            squares[row] = squares[row] + T.shfl_xor(squares[row], 1)
            squares[row] = squares[row] + T.shfl_xor(squares[row], 2)
        T.sync_threads()
        for row in T.unroll(2):
            for tile in T.unroll(tiles):
                for v in T.unroll(2):
                    if tile * 8 + lane % 4 * 2 + v < mixes:
                        shared[thread // 32, row * 8 + lane // 4, tile * 8 + lane % 4 * 2 + v] = total[
                            4 * tile + 2 * row + v
                        ]
            if lane % 4 == 0:
                shared[thread // 32, row * 8 + lane // 4, mixes] = squares[row]
        unstage(staged, coefficients, thread)
        T.sync_threads()
        for step in T.unroll(-(-ROWS * (mixes + 1) // threads)):
            at[0] = (step * threads + thread) // (mixes + 1)
            at[1] = (step * threads + thread) % (mixes + 1)
            if at[0] < ROWS and first + at[0] < tokens:
                value[0] = shared[0, at[0], at[1]]
                for w in T.unroll(1, warps):
                    value[0] = value[0] + shared[w, at[0], at[1]]
                if at[1] < mixes:
                    mul[split, first + at[0], at[1]] = value[0]
                else:
                    sqr[split, first + at[0]] = value[0]

    return load_matrix, multiply, store_sums


NONE, FIRST, MIXED = "none", "first", "mixed"
"""What the pass writes as the next input: nothing, the first stream, or the streams weighted by given pre mixes."""


def build(hidden: int, mixes: int, splits: int, fold: bool, update: bool, next_input: str):
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
    groups = num_groups(splits, threads)
    # Groups of four coefficients that a token needs: post, four of the combination, pre.
    quads = (1 + MULT if update else 0) + (1 if next_input == MIXED else 0)
    steps = -(-ROWS * quads // threads)
    tokens = T.dynamic("tokens", "int64")

    def given(present):
        return tokens if present else 1

    @T.macro
    def stage(staged, post_mix, comb_mix, pre_mix, first, tokens, thread):
        """Fetch coefficients of a tile; a thread has ``staged[4 i ... 4 i + 3]``."""
        for i in T.unroll(steps):
            entry = i * threads + thread
            token = T.min(first + entry // quads, tokens - 1)
            quad = entry % quads
            if entry < ROWS * quads:
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
    def unstage(staged, coefficients, thread):
        for i in T.unroll(steps):
            if i * threads + thread < ROWS * quads:
                for v in T.vectorized(4):
                    coefficients[(i * threads + thread) * 4 + v] = staged[4 * i + v]

    load_matrix, multiply, store_sums = macros(hidden, mixes, splits, fold, unstage)

    @T.macro
    def load(residual_words, streams, stream, first, tokens, word, lane):
        """One stream of the lane's two rows; rows past the end repeat the last one, and their sums are not written."""
        for row in T.unroll(2):
            token = T.min(first + row * 8 + lane // 4, tokens - 1)
            streams[row * MULT + stream] = residual_words[token, stream, word]

    @T.macro
    def load_output(x_words, outputs, first, tokens, word, lane):
        for row in T.unroll(2):
            token = T.min(first + row * 8 + lane // 4, tokens - 1)
            outputs[row] = x_words[token, word]

    @T.macro
    def update_streams(streams, outputs, row, coefficients, lane):
        """The lane's words of one row after the sublayer, in place."""
        ints = T.Tensor((2 * MULT * 4,), "int32", data=streams.data, scope="local")
        halves = T.Tensor((2 * MULT * VALUES,), "bfloat16", data=streams.data, scope="local")
        output_ints = T.Tensor((8,), "int32", data=outputs.data, scope="local")
        value = T.alloc_local((MULT * VALUES,), "float32")
        x = T.alloc_local((VALUES,), "float32")
        total = T.alloc_local((VALUES,), "float32")
        factor = T.alloc_local((4 + MULT * 4,), "float32")
        for i in T.vectorized(4 + MULT * 4):
            factor[i] = coefficients[(row * 8 + lane // 4) * 4 * quads + i]
        unpack(output_ints, 4 * row, x, 0)
        for i in T.unroll(MULT):
            unpack(ints, (row * MULT + i) * 4, value, VALUES * i)
        for o in T.unroll(MULT):
            for j in T.unroll(VALUES):
                total[j] = factor[o] * x[j]
                for i in T.unroll(MULT):
                    total[j] = T.ieee_fmaf(factor[4 + MULT * i + o], value[VALUES * i + j], total[j])
            pack(total, 0, halves, (row * MULT + o) * VALUES)

    @T.macro
    def write_input(streams, row, coefficients, input_words, token, word, lane):
        """The lane's word of the next sublayer's input."""
        ints = T.Tensor((2 * MULT * 4,), "int32", data=streams.data, scope="local")
        value = T.alloc_local((VALUES,), "float32")
        total = T.alloc_local((VALUES,), "float32")
        factor = T.alloc_local((MULT,), "float32")
        result = T.alloc_local((1,), "int32x4")
        halves = T.Tensor((VALUES,), "bfloat16", data=result.data, scope="local")
        if next_input == FIRST:
            result[0] = streams[row * MULT]
        else:
            for i in T.vectorized(MULT):
                factor[i] = coefficients[((row * 8 + lane // 4 + 1) * quads - 1) * 4 + i]
            for j in T.unroll(VALUES):
                total[j] = 0.0
            for i in T.unroll(MULT):
                unpack(ints, (row * MULT + i) * 4, value, 0)
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
        with T.Kernel(splits, T.min(T.ceildiv(tokens, ROWS), groups), threads=threads) as (split, group):
            T.annotate_min_blocks_per_sm(resident(threads))
            thread = T.get_thread_binding()
            lane = thread % 32
            unit = split * warps + thread // 32
            word = unit * (UNIT // VALUES) + lane % 4
            start = T.cast(group, "int64") * ROWS
            x_words = T.Tensor((given(update), words), "int32x4", data=x.data)
            residual_words = T.Tensor((tokens, MULT, words), "int32x4", data=residual.data)
            updated_words = T.Tensor((given(update), MULT, words), "int32x4", data=updated.data)
            input_words = T.Tensor((given(next_input != NONE), words), "int32x4", data=layer_input.data)
            matrix = T.alloc_shared((MULT * tiles * 2 * threads * 4,), "float32")
            shared = T.alloc_shared((warps, ROWS, mixes + 1), "float32")
            coefficients = T.alloc_shared((max(ROWS * quads * 4, 4),), "float32")
            staged = T.alloc_local((max(steps * 4, 4),), "float32")
            streams = T.alloc_local((2 * MULT,), "int32x4")
            ints = T.Tensor((2 * MULT * 4,), "int32", data=streams.data, scope="local")
            outputs = T.alloc_local((2,), "int32x4")
            total = T.alloc_local((4 * tiles,), "float32")
            squares = T.alloc_local((2,), "float32")
            if unit < units:
                for stream in T.unroll(MULT):
                    load(residual_words, streams, stream, start, tokens, word, lane)
                if update:
                    load_output(x_words, outputs, start, tokens, word, lane)
            if quads > 0:
                stage(staged, post_mix, comb_mix, pre_mix, start, tokens, thread)
                unstage(staged, coefficients, thread)
            load_matrix(fn, weight, matrix, unit, thread)
            T.sync_threads()
            for step in T.serial(T.ceildiv(tokens - start, ROWS * groups)):
                first = start + step * (ROWS * groups)
                following = first + ROWS * groups
                for i in T.unroll(4 * tiles):
                    total[i] = 0.0
                for row in T.unroll(2):
                    squares[row] = 0.0
                if quads > 0 and following < tokens:
                    stage(staged, post_mix, comb_mix, pre_mix, following, tokens, thread)
                if unit < units:
                    for row in T.unroll(2):
                        token = first + row * 8 + lane // 4
                        if update:
                            update_streams(streams, outputs, row, coefficients, lane)
                            if token < tokens:
                                for stream in T.unroll(MULT):
                                    updated_words[token, stream, word] = streams[row * MULT + stream]
                        if next_input != NONE and token < tokens:
                            write_input(streams, row, coefficients, input_words, token, word, lane)
                    if update and following < tokens:
                        load_output(x_words, outputs, following, tokens, word, lane)
                    for stream in T.unroll(MULT):
                        multiply(ints, stream, matrix, total, squares, thread)
                        if following < tokens:
                            # The words of the next tile travel while this one is worked on.
                            load(residual_words, streams, stream, following, tokens, word, lane)
                store_sums(total, squares, shared, staged, coefficients, mul, sqr, split, first, tokens, thread)

    return norm_fn
