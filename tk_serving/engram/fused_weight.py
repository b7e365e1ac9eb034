"""The two key-query weights of the Engram gate as one."""

import torch
from torch import Tensor

from tk_serving.arithmetic import wide
from tk_serving.compare import BITWISE
from tk_serving.engram._shapes import check_weight
from tk_serving.expect import Expect
from tk_serving.layout import aligned
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, Workload

_expect = Expect("fused_weight")


def _plan(weight_hidden: Tensor, weight_embed: Tensor) -> Plan:
    shape = check_weight(_expect, "weight_hidden", weight_hidden, torch.bfloat16)
    _expect.tensor("weight_embed", weight_embed, torch.bfloat16, shape)
    _expect.same_device(weight_hidden=weight_hidden, weight_embed=weight_embed)
    wide = aligned(weight_hidden.view(-1), weight_embed.view(-1))
    launch = Launch("engram.fused_weight", {"wide": wide}, lambda out, a, b: (a.view(-1), b.view(-1), out[0].view(-1)))
    return Plan((Out(shape, torch.float32),), (launch,))


def _inputs(make: Maker, *, tokens: int = 1, streams: int = 4, hidden: int) -> tuple:
    return make.randn(streams, hidden, dtype=torch.bfloat16), make.randn(streams, hidden, dtype=torch.bfloat16)


@operator(
    spec="operators.md P29",
    phase="both",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[{"tokens": 1, "streams": 4, "hidden": 512}, {"tokens": 1, "streams": 1, "hidden": 256}],
    workloads=[Workload("v4.1-load", {"hidden": 5120}, (1,), "v4.1")],
    peers=["tile_kernels"],
)
def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """The float32 product of the hidden-state and the embedding weight of the Engram gate.

    Taken once for each weight load; the gate multiplies by the product.

    Args:
        weight_hidden: bfloat16 [h, D], contiguous, D a multiple of 256.
        weight_embed: bfloat16 [h, D], contiguous.

    Returns:
        float32 [h, D], contiguous.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, layout or device.
    """
    return wide(weight_hidden) * wide(weight_embed)
