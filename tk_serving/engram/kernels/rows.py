"""A row of D columns over the threads of a block, eight columns (one word of 16 bytes in bfloat16) at a time.

Column order is the same for both load paths, so that sums do not depend on the alignment of the tensors.
"""

from dataclasses import dataclass

import tilelang.language as T

COLUMNS = 8  # in a word
FULL = 0xFFFFFFFF


@dataclass(frozen=True)
class Row:
    """How a row is spread: thread t owns the words t, t + threads, ...

    Attributes:
        width: columns, a multiple of 256.
        wide: load 16 bytes at once; otherwise single elements.
    """

    width: int
    wide: bool
    block: int = 0

    @property
    def threads(self) -> int:
        return self.block or min(128 * -(-self.width // 8192), 1024)

    @property
    def words(self) -> int:
        return self.width // COLUMNS

    @property
    def steps(self) -> int:
        """Words of a thread; the last may lie past the end of the row."""
        return -(-self.words // self.threads)

    @property
    def owned(self) -> int:
        """Columns of a thread."""
        return self.steps * COLUMNS

    def unit(self, dtype: str) -> str:
        """What one load of that dtype moves."""
        if not self.wide:
            return dtype
        return "float32x4" if dtype == "float32" else "int32x4"

    def size(self, dtype: str) -> int:
        """Elements of a unit."""
        if not self.wide:
            return 1
        return 4 if dtype == "float32" else 8

    def units(self, tensor, elements, dtype: str, scope: str = "global"):
        """View of a buffer in units."""
        return T.Tensor((elements // self.size(dtype),), self.unit(dtype), data=tensor.data, scope=scope)


def mover(row: Row, dtype: str, store: bool = False):
    """Macro ``move(local, tensor, base, thread)``: a thread's share of a row that starts at unit ``base``.

    Both buffers are viewed in units; reads by default, writes if ``store``.
    """
    per_word = COLUMNS // row.size(dtype)

    @T.macro
    def move(local, tensor, base, thread):
        for i in T.unroll(row.steps):
            word = i * row.threads + thread
            if word < row.words:
                for j in T.unroll(per_word):
                    if store:
                        tensor[base + word * per_word + j] = local[i * per_word + j]
                    else:
                        local[i * per_word + j] = tensor[base + word * per_word + j]

    return move


def word_copier(row: Row, with_grad: bool = False):
    """Macro that starts to copy word ``i`` of a thread, of x, k, v and the gradient of one token and stream."""

    def word(shared, source):
        return T.evaluate(T.call_extern("handle", "tl::cp_async_gs<16>", shared, source))

    @T.macro
    def fetch(x, k, v, grad, ring, slot, token, stream, i, thread):
        column = (i * row.threads + thread) * COLUMNS
        if i * row.threads + thread < row.words:
            if row.wide:
                word(T.address_of(ring[slot, 0, i, thread, 0]), T.address_of(x[token, stream, column]))
                word(T.address_of(ring[slot, 1, i, thread, 0]), T.address_of(k[token, stream, column]))
                word(T.address_of(ring[slot, 2, i, thread, 0]), T.address_of(v[token, column]))
                if with_grad:
                    word(T.address_of(ring[slot, 3, i, thread, 0]), T.address_of(grad[token, stream, column]))
            else:
                for j in T.unroll(COLUMNS):
                    ring[slot, 0, i, thread, j] = x[token, stream, column + j]
                    ring[slot, 1, i, thread, j] = k[token, stream, column + j]
                    ring[slot, 2, i, thread, j] = v[token, column + j]
                    if with_grad:
                        ring[slot, 3, i, thread, j] = grad[token, stream, column + j]

    return fetch


def copier(row: Row):
    """Macro that starts to copy all words of a thread, of x, k and v."""
    word = word_copier(row)

    @T.macro
    def fetch(x, k, v, ring, slot, token, stream, thread):
        for i in T.unroll(row.steps):
            word(x, k, v, x, ring, slot, token, stream, i, thread)

    return fetch


@T.macro
def block_sum(values, count, partial, turn, threads, thread):
    """values[:count] summed over the block, in a fixed order.

    ``partial``: shared float32 [2, count * threads / 32]. The caller alternates ``turn``, so that one barrier is
    enough: a thread reaches a half again only after the barrier of the other one.
    """
    for n in T.unroll(count):
        for step in T.unroll(5):
            values[n] = values[n] + T.shfl_xor(values[n], 16 >> step)
    if thread % 32 == 0:
        for n in T.unroll(count):
            partial[turn, thread // 32 * count + n] = values[n]
    T.sync_threads()
    for n in T.unroll(count):
        values[n] = partial[turn, n]
        for warp in T.unroll(threads // 32 - 1):
            values[n] = values[n] + partial[turn, (warp + 1) * count + n]
