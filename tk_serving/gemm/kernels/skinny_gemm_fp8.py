"""Few FP8 rows by FP8 weights.

The body of the kernel is CUDA, in the header beside this file: its loads go straight into the registers of a matrix
instruction.
"""

import pathlib

import tilelang.language as T

THREADS = 256
HEADER = pathlib.Path(__file__).with_suffix(".cuh")


def build(tokens: int, split: int, ahead: int, blocks: int, weights_first: bool):
    """
    Args:
        tokens: rows of activations at most, divided by 8.
        split: warps that divide the channels of a row of weights.
        ahead: slices of 128 channels that a warp has under way.
        blocks: of a multiprocessor.
        weights_first: programmatic dependent launch that waits once the first weights are on their way.
    """
    x_size, sf_size, w_size, w_sf_size, out_size = (
        T.dynamic(name, "int64") for name in ("x_size", "sf_size", "w_size", "w_sf_size", "out_size")
    )
    staged_size, sums_size = ahead * 2 * tokens * THREADS * 4, split * 8 * tokens * 16 * (THREADS // 32 // split)
    kernel = f"skinny::run<{tokens}, {split}, {ahead}, {str(weights_first).lower()}>"

    @T.prim_func
    def skinny_gemm_fp8(
        x: T.Tensor((x_size,), "uint8"),
        x_sf: T.Tensor((sf_size,), "float32"),
        w: T.Tensor((w_size,), "uint8"),
        w_sf: T.Tensor((w_sf_size,), "float32"),
        out: T.Tensor((out_size,), "bfloat16"),
        parts: T.int32,
        groups: T.int32,
        m: T.int32,
        n: T.int32,
        k: T.int32,
        x_m: T.int32,
        x_g: T.int32,
        sf_m: T.int32,
        sf_g: T.int32,
        sf_k: T.int32,
        w_sf_g: T.int32,
        w_sf_n: T.int32,
        w_sf_k: T.int32,
    ):
        with T.Kernel(parts, groups, threads=THREADS) as (_, _):
            T.import_source(HEADER.read_text())
            T.annotate_min_blocks_per_sm(blocks)
            staged = T.alloc_shared((staged_size,), "uint32")
            sums = T.alloc_shared((sums_size,), "float32")
            T.evaluate(
                T.call_extern(
                    "handle",
                    kernel,
                    T.address_of(staged[0]),
                    T.address_of(sums[0]),
                    T.address_of(x[0]),
                    T.address_of(x_sf[0]),
                    T.address_of(w[0]),
                    T.address_of(w_sf[0]),
                    T.address_of(out[0]),
                    m,
                    n,
                    k,
                    x_m,
                    x_g,
                    sf_m,
                    sf_g,
                    sf_k,
                    w_sf_g,
                    w_sf_n,
                    w_sf_k,
                )
            )
            if weights_first:  # done by then; for TileLang, which asks for the early launch
                T.pdl_sync()
                T.pdl_trigger()

    return skinny_gemm_fp8
