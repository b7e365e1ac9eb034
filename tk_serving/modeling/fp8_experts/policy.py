"""When the FP8 path is faster than the engine's own, and how its rows are aligned."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("w4a8", "upcast", "resident", "stock")
"""FP4 weights multiplied as they are, in every step; FP8 weights of one layer at a time in a shared workspace; of all
layers, beside the FP4 ones; never FP8."""

PAIRS_PER_EXPERT = {"upcast": 72, "resident": 36}
"""(token, choice) pairs for each expert from which on the FP8 path is taken; measured against Marlin on an H200, one
layer as a graph (docs/records/fp4-experts-layer-h200.json) and inside vLLM (docs/records/e2e-hopper-fp8-experts.json).
Both agree: resident weights lose at 24 pairs (one layer) and win at 36 (one layer) and 48 (inside vLLM), upcast ones
lose at 48 (one layer) and are even at 72.

Both the upcast and the time that the other path takes for each pair grow with the size of an expert, so that their
ratio hardly depends on hidden size, intermediate size, tensor or expert parallelism.
"""

FEW_PAIRS = 128
"""Up to so many pairs for each expert, tiles of 64 rows are faster than tiles of 128."""


@dataclass(frozen=True)
class Policy:
    """The choice for each step.

    Attributes:
        mode: one of ``MODES``.
        min_tokens: tokens of a step from which on FP8 runs; 0 takes the measured ratio.
    """

    mode: str = "upcast"
    min_tokens: int = 0

    def threshold(self, topk: int, experts: int) -> int:
        """Tokens of a step from which on the FP8 path is taken.

        Args:
            topk: choices of a token.
            experts: among which it chooses, those of other ranks included.
        """
        return self.min_tokens or -(-PAIRS_PER_EXPERT[self.mode] * experts // topk)

    def takes(self, tokens: int, topk: int, experts: int) -> bool:
        """Whether a step of so many tokens runs in FP8."""
        return self.mode != "stock" and tokens >= max(1, self.threshold(topk, experts))

    def steps(self, tokens: int, topk: int, experts: int) -> list[int]:
        """Numbers of tokens below ``tokens`` that, run once, bring every kernel of the FP8 path into memory.

        The matrix product chooses its tiles by the alignment and the number of rows.
        """
        if self.mode == "stock":
            return []
        counts, last = set(), FEW_PAIRS * experts // topk
        count = max(1, self.threshold(topk, experts))
        while count < tokens:
            counts |= {count, min(count, last), max(count, last + 1)}
            count *= 2
        return sorted(n for n in counts if n < tokens and self.takes(n, topk, experts))


def alignment(tokens: int, topk: int, experts: int) -> int:
    """Rows to a multiple of which the region of an expert is padded: those of a tile of the matrix product."""
    return 64 if tokens * topk <= FEW_PAIRS * experts else 128
