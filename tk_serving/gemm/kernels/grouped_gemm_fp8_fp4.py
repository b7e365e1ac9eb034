"""FP8 activations by FP4 weights, grouped by expert; the blocks stay and find their tiles themselves.

TileLang has neither this look-up nor wgmma of e5m2 by e4m3: the body of the kernel is CUDA, in the header beside this
file.
"""

import pathlib

import tilelang.language as T

from tk_serving.gemm.grouped_gemm_fp8_fp4 import MAX_EXPERTS
from tk_serving.gemm.kernels import wgmma
from tk_serving.gemm.tiles import TILE

MULTIPLIERS = 256
PLACE = "// Given by grouped_gemm_fp8_fp4.py.\n"
HEADER = pathlib.Path(__file__).with_suffix(".cuh")


def shared_bytes(width: int, subtiles: int, stages: int) -> int:
    """``Kernel::BYTES`` of the header."""
    stage = -(-(width * 128 + 2 * subtiles * TILE + width * 4 + 24) // 1024) * 1024
    return stages * stage + 2 * width * 144 + (3 * MAX_EXPERTS + 2) * 4


def source(width: int, step: int) -> str:
    """The header with the matrix instructions that a kernel needs."""
    widths = range(width, width // 3 - 1, -step) if step else (width,)
    given = f"constexpr int MAX_EXPERTS = {MAX_EXPERTS};\n" + "".join(map(wgmma.in_registers, widths))
    return HEADER.read_text().replace(PLACE, given, 1)


def build(width: int, step: int, subtiles: int, stages: int, loaders: int, blocks: int):
    """
    Args:
        width: rows of activations in a tile.
        step: tiles with fewer rows take so many columns less, several times, down to a third; 0: all are alike.
        subtiles: times 128 rows of weights in a tile.
        stages: slices of 128 channels that are under way.
        loaders: threads that load.
        blocks: of a multiprocessor.
    """
    rows, k, sf_size, experts, m, nb, kb = (
        T.dynamic(name, "int64") for name in ("rows", "k", "sf_size", "experts", "m", "nb", "kb")
    )
    room = shared_bytes(width, subtiles, stages)
    kernel = f"fp4::run<{width}, {step}, {subtiles}, {stages}, {loaders}>"

    @T.prim_func
    def grouped_gemm_fp8_fp4(
        x: T.Tensor((rows, k), "uint8"),
        x_sf: T.Tensor((sf_size,), "float32"),
        w: T.Tensor((experts, nb, kb, TILE), "uint8"),
        w_sf: T.Tensor((experts, m), "float32"),
        start: T.Tensor((experts,), "int32"),
        count: T.Tensor((experts,), "int32"),
        out: T.Tensor((rows, m), "bfloat16"),
        sf_stride: T.int64,
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=MULTIPLIERS + loaders) as _:
            T.import_source(source(width, step))
            T.annotate_min_blocks_per_sm(blocks)
            shared = T.alloc_shared((room,), "uint8")
            T.evaluate(
                T.call_extern(
                    "handle",
                    kernel,
                    T.address_of(shared[0]),
                    T.address_of(x[0, 0]),
                    T.address_of(x_sf[0]),
                    T.address_of(w[0, 0, 0, 0]),
                    T.address_of(w_sf[0, 0]),
                    T.address_of(start[0]),
                    T.address_of(count[0]),
                    T.address_of(out[0, 0]),
                    rows,
                    experts,
                    m,
                    kb,
                    sf_stride,
                )
            )

    return grouped_gemm_fp8_fp4
