"""On a CPU: the packed layouts, the look-up of codes by byte permutation and the fragments of wgmma, against a product.

python examples/fp4_gemm/check.py
"""

import layouts
import numpy as np
import torch

EXPERTS, ROWS, K = 2, 128, 256


def permuted_bytes(low: int, high: int, selector: int) -> int:
    """The instruction prmt without its sign mode: the kernel clears those bits."""
    table = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    return int.from_bytes(bytes(table[(selector >> 4 * i) & 7] for i in range(4)), "little")


def fragments(tile: np.ndarray, thread: int) -> list[int]:
    """``convert`` of kernel.cu: 64 codes of a thread as A fragments of four steps of k = 32."""
    found = [0] * 16
    for r in range(2):
        exponent = int(tile[4096 + 2 * thread + r])
        low = (0x0A080400 + exponent * 0x04040400) & 0xFFFFFFFF
        high = (0x12100E0C + exponent * 0x04040404) & 0xFFFFFFFF
        words = tile[2048 * r + 16 * thread :][:16].view(np.uint32)
        for s, word in enumerate(map(int, words)):
            magnitudes = word & 0x77777777
            found[4 * s + r] = permuted_bytes(low, high, magnitudes & 0xFFFF) | (word & 0x80808080)
            found[4 * s + 2 + r] = permuted_bytes(low, high, magnitudes >> 16) | ((word << 4) & 0x80808080)
    return found


def multiplied(tile: np.ndarray) -> torch.Tensor:
    """What the tensor cores see of 64 rows x 128 of k, in the order of the permuted activations."""
    seen = np.zeros((64, 128), np.uint8)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        group, quad = divmod(lane, 4)
        for index, value in enumerate(fragments(tile, thread)):
            step, part = divmod(index, 4)
            row, k = 16 * warp + group + 8 * (part & 1), 32 * step + 16 * (part >> 1) + 4 * quad
            seen[row, k : k + 4] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
    return torch.from_numpy(seen).view(torch.float8_e5m2).double()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (EXPERTS, ROWS, K), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(0, 27, (EXPERTS, ROWS, K // 32), dtype=torch.uint8, generator=generator)
    tiles = layouts.pack(codes, exponents)
    values = layouts.VALUES[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
    dense = values * torch.exp2(exponents.float() - layouts.BIAS).repeat_interleave(32, 2)
    order = layouts.permute(torch.arange(128, dtype=torch.uint8)[None])[0].long()
    for e in range(EXPERTS):
        assert torch.equal(layouts.unpack(tiles[e]), dense[e]), "unpacked weights differ"
        for n in range(ROWS // 64):
            for k in range(K // 128):
                want = dense[e, 64 * n : 64 * n + 64, 128 * k : 128 * k + 128].double()
                assert torch.equal(multiplied(tiles[e, n, k].numpy().copy()), want[:, order]), "fragments differ"
    print("layouts, look-up and fragments agree: all codes, exponents -13 to 13")


if __name__ == "__main__":
    main()
