"""One thread for each token: the sum has a fixed order, and a row is a few dozen bytes."""

import tilelang.language as T

THREADS = 64


def build(num_topk: int):
    tokens = T.dynamic("tokens")

    @T.prim_func
    def normalize_weight(
        weights: T.Tensor((tokens, num_topk), "float32"),
        denominators: T.Tensor((tokens,), "float32"),
        normalised: T.Tensor((tokens, num_topk), "float32"),
    ):
        with T.Kernel(T.ceildiv(tokens, THREADS), threads=THREADS) as block:
            token = block * THREADS + T.get_thread_binding()
            total = T.alloc_local((1,), "float32")
            held = T.alloc_local((num_topk,), "float32")  # the compiler cannot keep loads ahead of stores
            if token < tokens:
                total[0] = T.float32(1e-20)
                for k in T.unroll(num_topk):
                    held[k] = weights[token, k]
                for k in T.unroll(num_topk):
                    total[0] = total[0] + held[k]
                denominators[token] = total[0]
                for k in T.unroll(num_topk):
                    normalised[token, k] = held[k] / total[0]

    return normalize_weight
