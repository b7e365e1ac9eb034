"""Rotary position embedding, in place."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.arithmetic import fma
from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("apply_rotary")


def _plan(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
) -> Plan:
    _expect.dtype("query", query, torch.bfloat16, torch.float32)
    _expect.that(query.dim() in (3, 4), "query", "[T, heads, rot] or [B, S, heads, rot]", f"shape {list(query.shape)}")
    outer, rot = query.shape[:-2], query.shape[-1]
    _expect.multiple("query", rot, 2, "a last dimension")
    _check_heads("query", query)
    rows, _ = _expect.tensor("cos_sin_cache", cos_sin_cache, torch.float32, ("P", rot))
    _expect.that(rows > 0, "cos_sin_cache", "at least one row", f"shape {list(cos_sin_cache.shape)}")
    if key is not None:
        _expect.dtype("key", key, query.dtype)
        _expect.shape("key", key, (*outer, "heads", rot))
        _check_heads("key", key)
    if positions is not None:
        _expect.tensor("positions", positions, (torch.int32, torch.int64), outer)
    _expect.same_device(query=query, cos_sin_cache=cos_sin_cache, key=key, positions=positions)
    tokens = math.prod(outer)
    per_word = 16 // query.dtype.itemsize
    wide = rot // 2 % per_word == 0 and aligned(query, cos_sin_cache, key)
    config = {
        "dtype": str(query.dtype).removeprefix("torch."),
        "rot": rot,
        "pairs": per_word if wide else 1,
        "interleaved": interleaved,
        "positions": "none" if positions is None else str(positions.dtype).removeprefix("torch."),
    }
    return Plan((), (Launch("transform.apply_rotary", config, _arguments),) if tokens else ())


def _check_heads(argument: str, tensor: Tensor) -> None:
    _expect.that(tensor.shape[-2] > 0, argument, "at least one head", f"shape {list(tensor.shape)}")
    _expect.that(tensor.stride(-1) == 1, argument, "stride(-1) == 1", f"strides {list(tensor.stride())}")


def _arguments(
    _: Sequence[Tensor],
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
) -> tuple:
    # A missing key is the query again, with none of its heads to rotate.
    count = 0 if key is None else key.shape[-2]
    tensors = [query, query if key is None else key, *(() if positions is None else (positions,))]
    if query.dim() == 3:
        tensors = [t.unsqueeze(0) for t in tensors]
    return *tensors[:2], cos_sin_cache, *tensors[2:], count, int(conjugate), seqlen_offset


def _traffic(query: Tensor, cos_sin_cache: Tensor, key: Tensor | None, positions: Tensor | None, *_: object) -> int:
    tokens, rot = math.prod(query.shape[:-2]), query.shape[-1]
    rotated = sum(t.numel() * t.itemsize for t in (query, key) if t is not None)
    return 2 * rotated + tokens * (4 * rot + (0 if positions is None else positions.itemsize))


def _inputs(
    make: Maker,
    *,
    tokens: int,
    heads: int,
    rot: int,
    dtype: str = "bfloat16",
    head_dim: int = 0,
    key_heads: int = 0,
    batch: int = 0,
    positions: str = "int64",
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
    max_position: int = 4096,
) -> tuple:
    outer = (batch, tokens) if batch else (tokens,)
    wide = max(rot, head_dim)
    kind = getattr(torch, dtype)
    query = make.randn(*outer, heads, wide, dtype=kind)[..., wide - rot :]
    key = make.randn(*outer, key_heads, wide, dtype=kind)[..., wide - rot :] if key_heads else None
    angles = make.rand(max_position, rot // 2) * 6.28
    cache = make.value(torch.cat((angles.cos(), angles.sin()), dim=1))
    where = None
    if positions != "none":
        # Some rows lie outside the cache.
        where = make.randint(-1, max_position + 1, *outer, dtype=getattr(torch, positions))
    return query, cache, key, where, interleaved, conjugate, seqlen_offset


@operator(
    spec="operators.md A9",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("query", "key"),
    traffic=_traffic,
    cases=[
        {"tokens": 0, "heads": 2, "rot": 64},
        {"tokens": 3, "heads": 33, "rot": 64, "head_dim": 192, "key_heads": 1, "interleaved": True, "max_position": 5},
        {"tokens": 4, "heads": 4, "rot": 64, "interleaved": True, "conjugate": True},
        {"tokens": 5, "heads": 3, "rot": 128, "key_heads": 2, "batch": 2, "positions": "none", "seqlen_offset": 7},
        {"tokens": 5, "heads": 3, "rot": 128, "batch": 2, "positions": "int32", "max_position": 4, "conjugate": True},
        {"tokens": 6, "heads": 2, "rot": 64, "dtype": "float32", "key_heads": 2, "seqlen_offset": -2},
        {"tokens": 6, "heads": 2, "rot": 6, "head_dim": 7, "positions": "none", "max_position": 4},
    ],
    workloads=serving(
        lambda m: {
            "heads": m.num_attention_heads,
            "rot": 64,
            "head_dim": 192,
            "key_heads": 1,
            "interleaved": True,
        }
    ),
    peers=["vllm", "tile_kernels"],
)
def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Rotate query and key in place by the angles of their positions.

    Each pair (a, b) with c = cos, s = sin of its row becomes (fma(a, c, -(b s)), fma(a, s, b c)) in float32, rounded
    to nearest even. For a partial rotation pass ``query[..., -rot:]``. Tokens whose row lies outside the cache stay
    unchanged.

    Args:
        query: [T, heads, rot] or [B, S, heads, rot], bfloat16 or float32, stride(-1) == 1, rot even.
        cos_sin_cache: float32 [P, rot], contiguous: cosines in the left half, sines in the right.
        key: as query, with its own number of heads; same dtype.
        positions: int32 or int64 [T] or [B, S], contiguous; the row is position + seqlen_offset. Without it the
            position is the index of the token in its sequence.
        interleaved: pairs are (2j, 2j + 1); otherwise (j, j + rot / 2).
        conjugate: rotate backwards (the sines change sign).
        seqlen_offset: added to every position.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout or device.
    """
    if positions is None:
        length = query.shape[-3]
        positions = torch.arange(length, device=query.device).expand(query.shape[:-2])
    rows = positions.long() + seqlen_offset
    valid = (rows >= 0) & (rows < cos_sin_cache.shape[0])
    cos, sin = cos_sin_cache[torch.where(valid, rows, 0)][..., None, :].chunk(2, dim=-1)
    if conjugate:
        sin = -sin
    for tensor in (query, key):
        if tensor is None:
            continue
        if interleaved:
            left, right = tensor[..., 0::2], tensor[..., 1::2]
        else:
            left, right = tensor.chunk(2, dim=-1)
        a, b = left.float(), right.float()
        keep = ~valid[..., None, None]
        new_left = torch.where(keep, left, fma(a, cos, -(b * sin)).to(tensor.dtype))
        new_right = torch.where(keep, right, fma(a, sin, b * cos).to(tensor.dtype))
        left.copy_(new_left)
        right.copy_(new_right)
