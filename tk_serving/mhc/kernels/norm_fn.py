"""Products of the residual streams with the mixing matrix, and their square sums, split over the hidden dimension.

A block owns a slice of H (of all four streams) and passes over token tiles of 16 rows; a warp owns 32 columns of the
slice. The matrix products run on the tensor cores in TF32: bfloat16 is exact in it, the matrix is rounded to it. A lane
reads 16 bytes of two rows, and these words *are* its fragments: the columns of a dot product may be taken in any order,
so the order is chosen to fit. A lane's part of the matrix stays in shared memory, in a place that no other lane reads.

Every sum has an order that depends on H and the number of splits alone: a row has the same bits in any batch.
"""

import tilelang.language as T

from tk_serving.mhc.kernels.words import VALUES

MULT = 4
ROWS = 16  # tokens of a tile, the rows of the tensor-core operation
UNIT = 32  # columns of a warp: four lanes with a word of eight values each


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


def macros(hidden: int, mixes: int, splits: int, fold: bool):
    units = hidden // UNIT
    warps = -(-units // splits)
    threads = 32 * warps
    tiles = -(-mixes // 8)

    @T.macro
    def load_matrix(fn, weight, matrix, unit, thread):
        """The lane's fragments: entry (stream, tile, half) holds four neighbouring columns of one row of fn."""
        lane = thread % 32
        loaded = T.alloc_local((8 * 4,), "float32")
        factor = T.alloc_local((4,), "float32")
        for step in T.serial(MULT * tiles * 2 // 8):
            for i in T.unroll(8):
                entry = step * 8 + i
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
            for i in T.unroll(8):
                for v in T.unroll(4):
                    loaded[4 * i + v] = tf32(loaded[4 * i + v])
                for v in T.vectorized(4):
                    matrix[((step * 8 + i) * threads + thread) * 4 + v] = loaded[4 * i + v]

    @T.macro
    def multiply(ints, stream, matrix, total, squares, thread):
        """total += x fn^T and squares += x^2 for one stream x of the lane's two rows, words of four int32 at ``ints``."""
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
    def store_sums(total, squares, shared, mul, sqr, split, first, tokens, thread):
        """Sum over the warps in ascending order, and write the tile's part of the results."""
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
                        shared[thread // 32, row * 8 + lane // 4, tile * 8 + lane % 4 * 2 + v] = total[4 * tile + 2 * row + v]
            if lane % 4 == 0:
                shared[thread // 32, row * 8 + lane // 4, mixes] = squares[row]
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


def build(hidden: int, mixes: int, splits: int, fold: bool):
    words = hidden // VALUES
    units = hidden // UNIT
    warps = -(-units // splits)
    threads = 32 * warps
    tiles = -(-mixes // 8)
    groups = num_groups(splits, threads)
    load_matrix, multiply, store_sums = macros(hidden, mixes, splits, fold)
    tokens = T.dynamic("tokens", "int64")

    @T.macro
    def load(residual_words, streams, stream, first, tokens, word, lane):
        """One stream of the lane's two rows; rows past the end repeat the last one, and their sums are not written."""
        for row in T.unroll(2):
            token = T.min(first + row * 8 + lane // 4, tokens - 1)
            streams[row * MULT + stream] = residual_words[token, stream, word]

    @T.prim_func
    def norm_fn(
        residual: T.Tensor((tokens, MULT, hidden), "bfloat16"),
        fn: T.Tensor((mixes, MULT * hidden), "float32"),
        weight: T.Tensor((MULT * hidden,), "float32"),
        mul: T.Tensor((splits, tokens, mixes), "float32"),
        sqr: T.Tensor((splits, tokens), "float32"),
    ):
        with T.Kernel(splits, T.min(T.ceildiv(tokens, ROWS), groups), threads=threads) as (split, group):
            T.annotate_min_blocks_per_sm(resident(threads))
            thread = T.get_thread_binding()
            unit = split * warps + thread // 32
            residual_words = T.Tensor((tokens, MULT, words), "int32x4", data=residual.data)
            matrix = T.alloc_shared((MULT * tiles * 2 * threads * 4,), "float32")
            shared = T.alloc_shared((warps, ROWS, mixes + 1), "float32")
            streams = T.alloc_local((2 * MULT,), "int32x4")
            ints = T.Tensor((2 * MULT * 4,), "int32", data=streams.data, scope="local")
            total = T.alloc_local((4 * tiles,), "float32")
            squares = T.alloc_local((2,), "float32")
            lane = thread % 32
            word = unit * (UNIT // VALUES) + lane % 4
            start = T.cast(group, "int64") * ROWS
            if unit < units:
                for stream in T.unroll(MULT):
                    load(residual_words, streams, stream, start, tokens, word, lane)
            load_matrix(fn, weight, matrix, unit, thread)
            for step in T.serial(T.ceildiv(tokens - start, ROWS * groups)):
                first = start + step * (ROWS * groups)
                for i in T.unroll(4 * tiles):
                    total[i] = 0.0
                for row in T.unroll(2):
                    squares[row] = 0.0
                if unit < units:
                    for stream in T.unroll(MULT):
                        multiply(ints, stream, matrix, total, squares, thread)
                        if first + ROWS * groups < tokens:
                            # The words of the next tile travel while this one is worked on.
                            load(residual_words, streams, stream, first + ROWS * groups, tokens, word, lane)
                store_sums(total, squares, shared, mul, sqr, split, first, tokens, thread)

    return norm_fn
