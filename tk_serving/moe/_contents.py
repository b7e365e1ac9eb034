"""Checks of tensor contents, made with ``TK_SERVING_CHECK=1`` only."""

import torch
from torch import Tensor

from tk_serving.expect import Expect


def below(expect: Expect, argument: str, indices: Tensor, limit: int) -> None:
    """No index reaches ``limit``; negative ones mark absence."""
    largest = int(indices.max()) if indices.numel() else -1
    expect.that(largest < limit, argument, f"indices below {limit}", largest)


def one_pair_for_each_row(expect: Expect, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> None:
    """Every row with an expert is the position of exactly one pair, every other row of none."""
    rows = len(pos_to_expert)
    below(expect, "token_topk_to_pos", token_topk_to_pos, rows)
    pairs = torch.bincount(token_topk_to_pos[token_topk_to_pos >= 0], minlength=rows)
    wrong = (pairs != (pos_to_expert >= 0)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        owner = "a row with an expert" if pos_to_expert[row] >= 0 else "a padding row"
        expect.fail(
            "token_topk_to_pos", "one pair for each row with an expert", f"{int(pairs[row])} for {owner}, {row}"
        )
