"""An item is a few pairs of one head: two words of 16 bytes, or one pair where words are not aligned; a thread has two.

The heads of the key follow those of the query, so that one launch does both.
"""

import tilelang.language as T

THREADS = 64
ITEMS = 2  # of a thread: more blocks of fewer threads overlap better


def build(
    dtype: str, rot: int, pairs: int, interleaved: bool, positions: str, threads: int = THREADS, items: int = ITEMS
):
    wide = pairs > 1
    # The unit of the loads: a word of `pairs` elements, or a single element.
    unit, units = ("int32x4", rot // pairs) if wide else (dtype, rot)
    angle_unit, angle_units = ("float32x4", pairs // 4) if wide else ("float32", 1)
    chunks = units // 2
    batch, seq, rows = (T.dynamic(name, "int64") for name in ("batch", "seq", "rows"))
    query_heads, key_heads = (T.dynamic(name, "int64") for name in ("query_heads", "key_heads"))
    query_strides = tuple(T.dynamic(f"query_stride_{i}", "int64") for i in range(3))
    key_strides = tuple(T.dynamic(f"key_stride_{i}", "int64") for i in range(3))

    def left(chunk):
        return chunk * 2 if interleaved else chunk

    def right(chunk):
        return chunk * 2 + 1 if interleaved else chunk + chunks

    def grid(key_count):
        return batch * seq, T.ceildiv((query_heads + key_count) * chunks, threads * items)

    def extent(heads, strides):
        return (batch * strides[0] + seq * strides[1] + heads * strides[2] + rot) // (rot // units)

    def first(strides, b, s, head):
        return (b * strides[0] + s * strides[1] + head * strides[2]) // (rot // units)

    @T.macro
    def rotate(v, cos, sin, conjugate):
        for i in T.unroll(items):
            for j in T.unroll(pairs):
                at = i * 2 * pairs + (j * 2 if interleaved else j)
                to = i * 2 * pairs + (j * 2 + 1 if interleaved else j + pairs)
                a = T.cast(v[at], "float32")
                b = T.cast(v[to], "float32")
                s = T.if_then_else(conjugate != 0, -sin[i * pairs + j], sin[i * pairs + j])
                v[at] = T.cast(T.ieee_fmaf(a, cos[i * pairs + j], -(b * s)), dtype)
                v[to] = T.cast(T.ieee_fmaf(a, s, b * cos[i * pairs + j]), dtype)

    @T.macro
    def block_of_heads(token, group, query, key, cache, row, key_count, conjugate):
        b = token // seq
        s = token % seq
        query_units = T.Tensor((extent(query_heads, query_strides),), unit, data=query.data)
        key_units = T.Tensor((extent(key_heads, key_strides),), unit, data=key.data)
        angles = T.Tensor((rows * 2 * chunks * angle_units,), angle_unit, data=cache.data)
        v = T.alloc_local((2 * pairs * items,), dtype)
        cos = T.alloc_local((pairs * items,), "float32")
        sin = T.alloc_local((pairs * items,), "float32")
        v_units = T.Tensor((2 * items,), unit, data=v.data, scope="local")
        cos_units = T.Tensor((angle_units * items,), angle_unit, data=cos.data, scope="local")
        sin_units = T.Tensor((angle_units * items,), angle_unit, data=sin.data, scope="local")
        thread = T.get_thread_binding()
        # These loads do not wait for the position.
        for i in T.unroll(items):
            item = (group * items + i) * threads + thread
            head = item // chunks
            if head < query_heads:
                v_units[2 * i] = query_units[first(query_strides, b, s, head) + left(item % chunks)]
                v_units[2 * i + 1] = query_units[first(query_strides, b, s, head) + right(item % chunks)]
            elif head < query_heads + key_count:
                v_units[2 * i] = key_units[first(key_strides, b, s, head - query_heads) + left(item % chunks)]
                v_units[2 * i + 1] = key_units[first(key_strides, b, s, head - query_heads) + right(item % chunks)]
        if row >= 0 and row < rows:
            for i in T.unroll(items):
                for u in T.unroll(angle_units):
                    chunk = ((group * items + i) * threads + thread) % chunks
                    cos_units[i * angle_units + u] = angles[(row * 2 * chunks + chunk) * angle_units + u]
                    sin_units[i * angle_units + u] = angles[((row * 2 + 1) * chunks + chunk) * angle_units + u]
            rotate(v, cos, sin, conjugate)
            for i in T.unroll(items):
                item = (group * items + i) * threads + thread
                head = item // chunks
                if head < query_heads:
                    query_units[first(query_strides, b, s, head) + left(item % chunks)] = v_units[2 * i]
                    query_units[first(query_strides, b, s, head) + right(item % chunks)] = v_units[2 * i + 1]
                elif head < query_heads + key_count:
                    key_units[first(key_strides, b, s, head - query_heads) + left(item % chunks)] = v_units[2 * i]
                    key_units[first(key_strides, b, s, head - query_heads) + right(item % chunks)] = v_units[2 * i + 1]

    if positions == "none":

        @T.prim_func
        def apply_rotary(
            query: T.StridedTensor((batch, seq, query_heads, rot), (*query_strides, 1), dtype),
            key: T.StridedTensor((batch, seq, key_heads, rot), (*key_strides, 1), dtype),
            cache: T.Tensor((rows, rot), "float32"),
            key_count: T.int32,
            conjugate: T.int32,
            offset: T.int64,
        ):
            with T.Kernel(*grid(key_count), threads=threads) as (
                token,
                group,
            ):
                block_of_heads(token, group, query, key, cache, token % seq + offset, key_count, conjugate)

    else:

        @T.prim_func
        def apply_rotary(
            query: T.StridedTensor((batch, seq, query_heads, rot), (*query_strides, 1), dtype),
            key: T.StridedTensor((batch, seq, key_heads, rot), (*key_strides, 1), dtype),
            cache: T.Tensor((rows, rot), "float32"),
            at: T.Tensor((batch, seq), positions),
            key_count: T.int32,
            conjugate: T.int32,
            offset: T.int64,
        ):
            with T.Kernel(*grid(key_count), threads=threads) as (
                token,
                group,
            ):
                row = T.cast(at[token // seq, token % seq], "int64") + offset
                block_of_heads(token, group, query, key, cache, row, key_count, conjugate)

    return apply_rotary
