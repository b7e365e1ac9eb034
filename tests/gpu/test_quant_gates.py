"""The branch-free division of SwiGLU kernels by every bfloat16 gate there is."""

import pytest
import torch
from on_device import needs_device

from tk_serving.quant import swiglu_forward
from tk_serving.reference import swiglu_forward as reference

pytestmark = needs_device()


@pytest.mark.parametrize("clamp", [None, 10.0])
@pytest.mark.parametrize("up", [1.0, 3.0])
def test_every_bfloat16_gate(up, clamp):
    gates = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).view(64, 1024)
    x = torch.cat((gates, torch.full_like(gates, up)), dim=1)
    found = swiglu_forward(x, "fp32", clamp_value=clamp)
    expected = reference(x, "fp32", clamp_value=clamp)
    equal = (found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())
    assert equal.all(), f"{int((~equal).sum())} gates, among them {gates[~equal][:8].tolist()}"
