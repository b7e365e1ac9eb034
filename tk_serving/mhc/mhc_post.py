"""The residual streams after a sublayer: its output spread over them, and the streams mixed."""

import torch
from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.mhc._math import multiply_add
from tk_serving.mhc._shapes import BF16, F32, MULT, count, hidden, lead, overlap, owned, result, rows
from tk_serving.operator import Launch, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("mhc_post")


def _plan(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None) -> Plan:
    size = hidden(_expect, "x", x)
    tokens = lead(_expect, "x", x, BF16, "H")
    lead(_expect, "residual", residual, BF16, MULT, size, like=tokens, contiguous=False)
    lead(_expect, "post_layer_mix", post_layer_mix, F32, MULT, 1, like=tokens)
    lead(_expect, "comb_res_mix", comb_res_mix, F32, MULT, MULT, like=tokens)
    _expect.same_device(x=x, residual=residual, post_layer_mix=post_layer_mix, comb_res_mix=comb_res_mix, out=out)
    slot = result(_expect, "out", out, residual.shape, BF16)
    if out is not None:
        _expect.that(not overlap(out, residual), "out", "memory apart from residual", "overlapping memory")
    launch = Launch(
        "mhc.post",
        {"hidden": size},
        lambda outs, x, residual, post, comb, _: (
            rows(x, size),
            rows(residual, MULT, size),
            rows(post, MULT),
            rows(comb, MULT * MULT),
            outs[0].view(-1, MULT, size),
        ),
    )
    return Plan((slot,), (launch,) if count(tokens) else ())


def _inputs(make: Maker, *, tokens: int, hidden: int, layout: str = "dense") -> tuple:
    x = make.randn(tokens, hidden, dtype=BF16)
    if layout == "broadcast":
        residual = make.randn(tokens, 1, hidden, dtype=BF16).expand(tokens, MULT, hidden)
    elif layout == "stream-major":
        residual = make.randn(MULT, tokens, hidden, dtype=BF16).transpose(0, 1)
    else:
        residual = make.randn(tokens, MULT, hidden, dtype=BF16)
    return x, residual, make.rand(tokens, MULT, 1), make.rand(tokens, MULT, MULT)


@operator(
    spec="operators.md P39",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    mutates=("out",),
    finish=owned(1),
    aliases=("mhc_post_fwd",),
    moves_data=True,
    cases=[
        {"tokens": 0, "hidden": 128},
        {"tokens": 3, "hidden": 192},
        {"tokens": 2, "hidden": 1280},
        {"tokens": 3, "hidden": 192, "layout": "broadcast"},
        {"tokens": 3, "hidden": 192, "layout": "stream-major"},
    ],
    workloads=serving(lambda m: {"hidden": m.hidden_size} if m.hc_mult else None),
    peers=["vllm", "sglang", "tile_kernels"],
)
def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """Residual streams after a sublayer: ``out[o] = post[o] x + sum over i of comb[i, o] residual[i]``.

    In float32: the product with x first, then fused multiply-adds in ascending i; rounded once.

    Args:
        x: bfloat16 [..., H], contiguous: the output of the sublayer; H a multiple of 64.
        residual: bfloat16 [..., 4, H] with any strides, also broadcast ones.
        post_layer_mix: float32 [..., 4, 1], contiguous.
        comb_res_mix: float32 [..., 4, 4] (from, to), contiguous.
        out: where to write; may not share memory with residual. A new tensor by default.

    Returns:
        bfloat16 [..., 4, H].
    """
    streams = []
    for o in range(MULT):
        total = post_layer_mix[..., o, :] * wide(x)
        for i in range(MULT):
            total = multiply_add(comb_res_mix[..., i, o : o + 1], residual[..., i, :], total)
        streams.append(total.to(residual.dtype))
    return torch.stack(streams, dim=-2)
