"""What the operators on expert-major rows share: checks, scale layouts, inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tk_serving.arithmetic import fma
from tk_serving.expect import Expect, short
from tk_serving.layout import WORD, aligned
from tk_serving.moe.get_fused_mapping import capacity, get_fused_mapping
from tk_serving.operator import Launch, Out
from tk_serving.quant.formats import encode_e4m3
from tk_serving.workloads import Maker, Model, Workload, at_one_size, serving

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def check_rows(expect: Expect, name: str, x: Tensor) -> None:
    """The dtype sizes that rows are copied in, and at least one column."""
    expect.kind(x.dtype.itemsize in INTEGERS, name, "a dtype of 1, 2 or 4 bytes", short(x.dtype))
    expect.tensor(name, x, x.dtype, ("T", "H"))
    expect.that(x.shape[1] > 0, name, "at least one column", list(x.shape))


def check_mapping(expect: Expect, tokens: int, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> tuple[int, int]:
    """Check both directions of the mapping; return K and the number of rows."""
    topk = expect.tensor("token_topk_to_pos", token_topk_to_pos, torch.int32, (tokens, "K"))[1]
    expect.that(topk > 0, "token_topk_to_pos", "at least one column", list(token_topk_to_pos.shape))
    rows = expect.tensor("pos_to_expert", pos_to_expert, torch.int32, ("N",))[0]
    return topk, rows


def sf_out(rows: int, columns: int, dtype: torch.dtype, column_major: bool) -> Out:
    """Scales of the rows: row-major, or column-major with columns that start on 16 bytes."""
    if not column_major:
        return Out((rows, columns), dtype)
    padded = (rows + 3) // 4 * 4
    return Out((rows, columns), dtype, (1, padded), storage=padded * columns)


MAX_TOKENS_TO_SCATTER_SF = 256
MAX_WORDS_TO_SCATTER_SF = 64 * 1024


def gathers_sf(tokens: int, column_major: bool, words_of_token: int = 0) -> bool:
    """Whether the scales are written by column; a token has ``words_of_token`` at all its positions together.

    Neighbours in a column belong to different tokens, so that scattered scales are written four bytes at a time. Where
    they are many, it pays to note the token of every row and to write the columns by it.
    """
    many = tokens > MAX_TOKENS_TO_SCATTER_SF or tokens * words_of_token > MAX_WORDS_TO_SCATTER_SF
    return column_major and many


def gather_sf(columns: int, at: int, read: Callable[..., tuple[Tensor, Tensor]]) -> Launch:
    """The launch that writes column-major scales, output 1.

    Output or scratch ``at`` has the token of every row; ``read(outputs, *public arguments)`` gives the scales of the
    tokens as int32, and ``pos_to_expert``.
    """

    def arguments(out: Sequence[Tensor], *arguments: Any) -> tuple:
        sf, pos_to_expert = read(out, *arguments)
        return sf, out[at], pos_to_expert, sf_words(out[1], True)

    return Launch("moe.gather_sf", {"columns": columns}, arguments)


def sf_words(sf: Tensor, column_major: bool) -> Tensor:
    """The scales as int32 with their padding rows as ordinary rows."""
    words = sf.view(torch.int32)
    if not column_major:
        return words
    padded = (sf.shape[0] + 3) // 4 * 4
    return words.as_strided((padded, sf.shape[1]), (1, padded))


def is_wide(*rows: Tensor) -> int:
    """1 if all rows of the tensors can be copied in 16-byte words, else 0."""
    return int(aligned(*rows) and all(t.shape[-1] * t.itemsize % WORD == 0 for t in rows))


def mapping(
    make: Maker, tokens: int, experts: int, topk: int, alignment: int, drop: bool = False
) -> tuple[Tensor, Tensor]:
    """``token_topk_to_pos`` and ``pos_to_expert`` of random choices; with ``drop`` some pairs have no position."""
    idx = make.topk_ids(tokens, experts, topk)
    rows = capacity(tokens * topk, experts, alignment)
    if idx.device.type == "meta":
        return make.randint(0, 1, tokens, topk, dtype=torch.int32), make.randint(0, 1, rows, dtype=torch.int32)
    if drop:
        idx[:, ::3] = -1
    found: Sequence[Tensor] = get_fused_mapping.operator.call("reference", idx, experts, rows, alignment)
    return make.place(found[3]), make.place(found[0])


def workloads(parameters: Callable[[Model], dict[str, Any]]) -> tuple[Workload, ...]:
    """As engines need it, with padding rows left as they are; and with zeros there, at one size of each phase."""
    zeros = serving(lambda model: {**parameters(model), "zero_padding": True})
    return serving(lambda model: {**parameters(model), "zero_padding": False}) + at_one_size(zeros)


def forget_padding(results: Sequence[Tensor | None], pos_to_expert: Tensor, zero_padding: bool) -> None:
    """Clear the padding rows of result 0 where they are not zeros already: their content is unspecified."""
    data = results[0]
    if not zero_padding and data is not None:
        data.view(INTEGERS[data.dtype.itemsize])[pos_to_expert < 0] = 0


def traffic(read: Sequence[Tensor], outputs: Sequence[Any], pos_to_expert: Tensor, zero_padding: bool) -> int:
    """Bytes that an expansion must move: without ``zero_padding`` only the rows of result 0 that have an expert."""
    written = [out.num_bytes for out in outputs]
    if not zero_padding and pos_to_expert.device.type != "meta":
        written[0] = written[0] // max(1, len(pos_to_expert)) * int((pos_to_expert >= 0).sum())
    return sum(t.numel() * t.element_size() for t in read) + sum(written)


def scatter(rows: int, x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    """[rows, H]: the row of every token at its positions, zero bytes elsewhere."""
    data = x.contiguous().view(INTEGERS[x.dtype.itemsize])
    out = torch.zeros(rows, x.shape[1], dtype=data.dtype, device=x.device)
    for positions in token_topk_to_pos.long().unbind(1):
        valid = (positions >= 0) & (positions < rows)
        out[positions[valid]] = data[valid]
    out[pos_to_expert < 0] = 0
    return out.view(x.dtype)


def combine(
    x: Tensor, x_sf: Tensor | None, weights: Tensor | None, token_topk_to_pos: Tensor, shared: Tensor | None = None
) -> Tensor:
    """float32 [T, H]: the weighted rows at the positions of every token, added in ascending order."""
    tokens, topk = token_topk_to_pos.shape
    acc = torch.zeros(tokens, x.shape[1], device=x.device)
    for k in range(topk if len(x) else 0):
        position = token_topk_to_pos[:, k].long()
        valid = (position >= 0) & (position < len(x))
        position = torch.where(valid, position, 0)
        scale = torch.ones(tokens, device=x.device) if weights is None else weights[:, k]
        if x_sf is not None:
            scale = scale * x_sf[position]
        acc = torch.where(valid[:, None], fma(x[position].float(), scale[:, None].expand_as(acc), acc), acc)
    return acc if shared is None else acc + shared.float()


def rounded(acc: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even; e4m3 saturates."""
    return encode_e4m3(acc) if dtype == torch.float8_e4m3fn else acc.to(dtype)
