"""bfloat16 rows in words of 16 bytes: how they are spread over threads, and their values as float32."""

import tilelang.language as T

VALUES = 8  # of one word


def spread(hidden: int, most: int = 256) -> tuple[int, int]:
    """(threads, blocks): one thread for each word of a row, as evenly as the size allows, at most ``most`` a block."""
    words = hidden // VALUES
    for threads in (256, 224, 192, 160, 128):
        if threads <= most and words % threads == 0:
            return threads, words // threads
    threads = min(128, (words + 31) // 32 * 32)
    return threads, (words + threads - 1) // threads


@T.macro
def unpack(ints, at, values, to):
    """values[to ... to + 7] = the float32 values of the word in the int32 ints[at ... at + 3]."""
    for i in T.unroll(VALUES // 2):
        values[to + 2 * i] = T.reinterpret(ints[at + i] << 16, "float32")
        values[to + 2 * i + 1] = T.reinterpret(ints[at + i] & T.int32(-65536), "float32")


@T.macro
def pack(values, at, halves, to):
    """The bfloat16 halves[to ... to + 7] of a word = values[at ... at + 7], rounded to nearest even."""
    for i in T.vectorized(VALUES):
        halves[to + i] = T.cast(values[at + i], "bfloat16")
