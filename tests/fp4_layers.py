"""Layers of FP4 experts as engines leave them for Marlin, and what they compute, for the tests of both engines."""

import torch

from tk_serving.quant import marlin
from tk_serving.quant.formats import decode_e2m1
from tk_serving.quant.scales import of_exponents

EXPERTS, INTERMEDIATE, TOPK, LIMIT = 4, 256, 2, 2.0


def fill(layer, hidden, seed=0, exponent=None):
    """Give a layer weights repacked for Marlin; returns the layer and the weights as float32."""
    generator, values = torch.Generator().manual_seed(seed), {}
    for name, n, k in (("w13", 2 * INTERMEDIATE, hidden), ("w2", hidden, INTERMEDIATE)):
        codes = torch.randint(-128, 128, (EXPERTS, n, k // 2), generator=generator, dtype=torch.int8)
        exponents = torch.randint(118, 121, (EXPERTS, n, k // 32), generator=generator, dtype=torch.uint8)
        if exponent is not None:
            exponents[0, 0, 0] = exponent
        setattr(layer, f"{name}_weight", torch.nn.Parameter(marlin.pack_codes(codes), requires_grad=False))
        sf = marlin.pack_exponents(exponents).view(torch.float8_e8m0fnu)
        setattr(layer, f"{name}_weight_scale", torch.nn.Parameter(sf, requires_grad=False))
        scale = of_exponents(exponents.int()).repeat_interleave(32, dim=-1)
        values[name] = torch.stack([decode_e2m1(c) for c in codes]) * scale
    return layer, values


def inputs(hidden, tokens=9, seed=1, total=EXPERTS):
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(tokens, total, generator=generator).topk(TOPK, dim=1)
    return torch.randn(tokens, hidden, generator=generator).bfloat16(), ids.int(), weights


def expected(values, x, ids, weights):
    out = torch.zeros(x.shape)
    for token, choice in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, choice])
        gate, up = (values["w13"][expert] @ x[token].float()).chunk(2)
        y = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        out[token] += weights[token, choice] * (values["w2"][expert] @ y)
    return out


def close(a, b):
    return float((a.float() - b).norm() / b.norm()) < 0.06  # what casting activations to FP8 twice costs
