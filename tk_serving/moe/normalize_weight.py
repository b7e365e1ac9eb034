"""Router weights divided by their sum."""

import torch
from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Launch, Out, Plan, operator
from tk_serving.workloads import Maker, serving

_expect = Expect("normalize_weight")


def _plan(topk_weights: Tensor) -> Plan:
    tokens, topk = _expect.tensor("topk_weights", topk_weights, torch.float32, ("T", "K"))
    _expect.that(topk > 0, "topk_weights", "at least one column", [tokens, topk])
    launch = Launch("moe.normalize_weight", {"num_topk": topk}, lambda out, weights: (weights, out[0], out[1]))
    outputs = (Out((tokens,), torch.float32), Out((tokens, topk), torch.float32))
    return Plan(outputs, (launch,) if tokens else ())


def _inputs(make: Maker, *, tokens: int, topk: int) -> tuple:
    weights = make.rand(tokens, topk)
    if tokens > 2 and weights.device.type != "meta":
        weights[1] = 0
    return (weights,)


@operator(
    spec="operators.md P20",
    phase="inference",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[{"tokens": 0, "topk": 8}, {"tokens": 200, "topk": 8}, {"tokens": 5, "topk": 1}, {"tokens": 33, "topk": 6}],
    workloads=serving(lambda m: {"topk": m.num_experts_per_tok}),
    peers=["tile_kernels"],
)
def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide the weights of every token by their sum.

    Args:
        topk_weights: float32 [T, K], contiguous.

    Returns:
        The denominators, float32 [T]: 1e-20 plus the weights, added in ascending order; and the normalised weights,
        float32 [T, K]. A row of zeros stays zero.

    Raises:
        TypeError: dtype.
        ValueError: wrong shape or layout.
    """
    denominator = torch.full_like(topk_weights[:, 0], 1e-20)
    for k in range(topk_weights.shape[1]):
        denominator = denominator + topk_weights[:, k]
    return denominator, topk_weights / denominator[:, None]
