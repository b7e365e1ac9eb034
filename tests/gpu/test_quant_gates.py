"""The exponential and the branch-free division of SwiGLU kernels by every bfloat16 gate there is."""

import pytest
import torch
from on_device import needs_device, same

from tk_serving.quant import (
    swiglu_forward,
    swiglu_forward_and_per_token_cast,
    swiglu_forward_and_per_token_cast_grouped,
)
from tk_serving.reference import swiglu_forward as reference

pytestmark = needs_device()


@pytest.mark.parametrize("clamp", [None, 10.0, 200.0, 10.1])
@pytest.mark.parametrize("up", [1.0, 3.0])
def test_every_bfloat16_gate(up, clamp):
    gates = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).view(64, 1024)
    x = torch.cat((gates, torch.full_like(gates, up)), dim=1)
    found = swiglu_forward(x, "fp32", clamp_value=clamp)
    expected = reference(x, "fp32", clamp_value=clamp)
    equal = (found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())
    assert equal.all(), f"{int((~equal).sum())} gates, among them {gates[~equal][:8].tolist()}"


@pytest.mark.parametrize("clamp", [0.5, 10.0, 200.0])
def test_every_bfloat16_gate_in_both_quantised_forms(clamp):
    # With a limit that is a bfloat16 the grouped form has an exponential, limits and a scale rule of its own.
    random = torch.Generator("cuda").manual_seed(1)
    gates = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).view(64, 1024)
    x = torch.cat((gates, torch.randn(64, 1024, device="cuda", generator=random).mul(6).bfloat16()), dim=1).repeat(6, 1)
    weights = torch.randn(len(x), device="cuda", generator=random).mul(3)
    special = [0.0, -0.0, float("nan"), float("inf"), 2.0**64, -(2.0**65), 1e-40, -1e-20]
    weights[::48] = torch.tensor(special, device="cuda")
    positions = torch.arange(len(x), dtype=torch.int32, device="cuda")
    layout = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    found = swiglu_forward_and_per_token_cast_grouped(x, "e4m3", 32, None, weights, clamp_value=clamp, **layout)
    expected = swiglu_forward_and_per_token_cast(
        x, "e4m3", 32, positions, weights[:, None], swiglu_clamp_value=clamp, **layout
    )
    for a, b in zip(found, expected, strict=True):
        same(a, b)
