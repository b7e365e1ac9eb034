"""Rotary position embedding of the last channels of each head, and the cast to FP8 for the product that follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_serving.arithmetic import fma
from tk_serving.compare import BITWISE
from tk_serving.expect import Expect, short
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Out, Plan, Quantized, operator
from tk_serving.quant import casting, scales
from tk_serving.quant.formats import FORMATS
from tk_serving.workloads import Maker, Model, serving

GROUP = 128  # channels that share a scale
FLOOR = 1e-10  # smallest maximum of a group
FEW = 64

_expect = Expect("apply_rotary_and_per_token_cast")


def config(tokens: int) -> dict[str, int]:
    """The variant for so many tokens: with few of them more blocks, each of one token."""
    if isinstance(tokens, torch.SymInt) or tokens <= FEW:
        return {"tokens_each": 1, "threads": 128}
    return {"tokens_each": 4, "threads": 256}


def _plan(x: Tensor, cos_sin_cache: Tensor, positions: Tensor, num_groups: int, conjugate: bool) -> Plan:
    _expect.dtype("x", x, torch.bfloat16)
    _expect.shape("x", x, ("T", "heads", "head_dim"))
    tokens, heads, head_dim = x.shape
    _expect.multiple("x", head_dim, GROUP, "a last dimension")
    _expect.positive("num_groups", num_groups)
    _expect.multiple("x", heads, num_groups, "a number of heads")
    _expect.that(x.stride(-1) == 1, "x", "stride(-1) == 1", f"strides {list(x.stride())}")
    _expect.that(aligned(x), "x", "heads that begin at aligned addresses, multiples of 16 bytes", "others")
    cache = _expect.tensor("cos_sin_cache", cos_sin_cache, torch.float32, ("P", "rot"), contiguous=False)
    rows, rot = cache
    _expect.that(rows > 0, "cos_sin_cache", "at least one row", f"shape {list(cache)}")
    _expect.multiple("cos_sin_cache", rot, 8, "a last dimension")
    _expect.that(rot <= head_dim, "cos_sin_cache", f"a last dimension up to head_dim = {head_dim}", rot)
    _expect.tensor("positions", positions, (torch.int32, torch.int64), (tokens,))
    _expect.same_device(x=x, cos_sin_cache=cos_sin_cache, positions=positions)
    width = heads // num_groups * head_dim
    data = Out((tokens, num_groups, width), torch.float8_e4m3fn, (width, tokens * width, 1))
    flat = scales.sf_out(scales.COLUMN, tokens, heads * head_dim // GROUP)
    assert flat.strides is not None
    stride, blocks = flat.strides[1], width // GROUP
    sf = Out((tokens, num_groups, blocks), torch.float32, (1, blocks * stride, stride), flat.storage)
    chosen = {
        "head_dim": head_dim,
        "rope_dim": rot,
        "heads_per_group": heads // num_groups,
        "positions": short(positions.dtype),
        "floor": FLOOR,
        **config(tokens),
    }
    launch = Launch("transform.apply_rotary_and_per_token_cast", chosen, _arguments)
    return Plan((data, sf), (launch,) if tokens else ())


def _arguments(
    outputs: Sequence[Tensor], x: Tensor, cos_sin_cache: Tensor, positions: Tensor, num_groups: int, conjugate: bool
) -> tuple:
    data, sf = outputs
    stride = sf.stride(2)
    columns = sf.as_strided((sf.shape[1] * sf.shape[2], stride), (stride, 1))
    return x, cos_sin_cache, positions, data.transpose(0, 1), columns, int(conjugate)


def _traffic(x: Tensor, cos_sin_cache: Tensor, positions: Tensor, *_: object) -> int:
    tokens, rot = x.shape[0], cos_sin_cache.shape[1]
    return x.numel() * 3 + x.numel() // GROUP * 4 + tokens * (4 * rot + positions.itemsize)


def _inputs(
    make: Maker,
    *,
    tokens: int,
    heads: int,
    num_groups: int,
    head_dim: int = 512,
    rot: int = 64,
    padded_heads: int = 0,
    positions: str = "int64",
    conjugate: bool = True,
    max_position: int = 4096,
    special: bool = False,
) -> tuple:
    x = make.randn(tokens, max(heads, padded_heads), head_dim, dtype=torch.bfloat16)
    if special and x.device.type != "meta":
        x[:, 0] = 0.0
        x[:, 1] *= 1e-12
        x[0, -1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        x[0, -1, -3:] = torch.tensor([torch.nan, torch.inf, -0.0])
    angles = make.rand(max_position, rot // 2) * 6.28
    cache = make.value(torch.cat((angles.cos(), angles.sin()), dim=1))
    # Some rows lie outside the cache.
    where = make.randint(-1, max_position + 1, tokens, dtype=getattr(torch, positions))
    return x[:, :heads], cache, where, num_groups, conjugate


def _v4(model: Model) -> dict[str, object] | None:
    """The attention's result, before the first of two output projections."""
    if model.hc_mult == 0 or model.quant_group != GROUP:
        return None
    return {"heads": model.num_attention_heads, "num_groups": model.o_groups}


@operator(
    spec="operators.md A9 and P1",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    traffic=_traffic,
    moves_data=True,
    cases=[
        {"tokens": 0, "heads": 2, "num_groups": 1},
        {"tokens": 1, "heads": 2, "num_groups": 2, "special": True},
        {"tokens": 5, "heads": 4, "num_groups": 2, "padded_heads": 5, "special": True, "max_position": 4},
        {"tokens": 70, "heads": 3, "num_groups": 3, "head_dim": 256, "positions": "int32"},
        {"tokens": 6, "heads": 8, "num_groups": 2, "head_dim": 128, "rot": 128, "conjugate": False},
        {"tokens": 67, "heads": 6, "num_groups": 2, "head_dim": 384, "rot": 136, "special": True},
        {"tokens": 7, "heads": 2, "num_groups": 1, "head_dim": 256, "rot": 8, "padded_heads": 3},
    ],
    workloads=serving(_v4),
    peers=["vllm"],
)
def apply_rotary_and_per_token_cast(
    x: Tensor, cos_sin_cache: Tensor, positions: Tensor, num_groups: int, conjugate: bool = False
) -> Quantized:
    """Rotate the last channels of each head by the angles of its token, and quantise all to FP8 in groups of 128.

    Each pair (a, b) = (2j, 2j + 1) of the last ``rot`` channels with c = cos, s = sin of its row becomes
    (fma(a, c, -(b s)), fma(b, c, a s)) in float32, which is not rounded before the cast. The scale of a group is the
    smallest power of two that is at least amax / 448, with amax at least 1e-10. A token whose position lies outside the
    cache is rotated by the angle zero. ``value = data * sf``.

    Args:
        x: bfloat16 [T, heads, head_dim], head_dim a multiple of 128, stride(-1) == 1; the heads begin at multiples of
            16 bytes.
        cos_sin_cache: float32 [P, rot], row-strided, rot a multiple of 8: cosines in the left half, sines in the right.
        positions: int32 or int64 [T], contiguous: the row of each token.
        num_groups: the heads are divided into so many groups, each with a product of its own.
        conjugate: rotate backwards (the sines change sign).

    Returns:
        (data, sf): float8_e4m3fn [T, G, heads / G * head_dim], in memory group by group, and float32
        [T, G, heads / G * head_dim / 128], column-major for each group, columns on 16 bytes.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout or device.
    """
    tokens, heads, head_dim = x.shape
    rot, rows = cos_sin_cache.shape[1], positions.long()
    valid = (rows >= 0) & (rows < cos_sin_cache.shape[0])
    still = torch.cat((torch.ones(rot // 2), torch.zeros(rot // 2))).to(x.device)
    angles = torch.where(valid[:, None], cos_sin_cache[torch.where(valid, rows, 0)], still)
    cos, sin = angles[:, None].chunk(2, dim=-1)
    if conjugate:
        sin = -sin
    values = x.float()
    a, b = values[..., head_dim - rot :: 2], values[..., head_dim - rot + 1 :: 2]
    turned = torch.stack((fma(a, cos, -(b * sin)), fma(b, cos, a * sin)), dim=-1).flatten(-2)
    values = torch.cat((values[..., : head_dim - rot], turned), dim=-1).view(tokens, heads * head_dim)
    amax = casting.amax_of(values, None, 1, GROUP)
    sf, inverse = scales.rule(amax, FORMATS["e4m3"], round_sf=True, floor=FLOOR)
    data = casting.quantize(values, None, inverse, "e4m3", 1, GROUP)
    by_group = data.view(tokens, num_groups, -1).transpose(0, 1).contiguous().transpose(0, 1)
    return by_group, scales.lay_out(sf, scales.COLUMN).unflatten(1, (num_groups, -1))
